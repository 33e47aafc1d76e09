"""Finds the port that an endpoint listens on.

A port that the user chose is the one, or the process does not start; the default one is a wish, since several pipelines
may run on one machine. So is one that another process has which records below the same folder: both have the same
configuration, and show each other's recordings.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidemill.core.errors import ConfigError
from tidemill.runtime.port_owners import Claim, PortOwners

log = structlog.get_logger(__name__)

#: This many ports are tried, from the default one on.
TRIED_PORTS = 20
_BACKLOG = 64


class Address(Protocol):
    """The part of a section of the configuration that says where to listen."""

    host: str
    port: int

    @property
    def model_fields_set(self) -> AbstractSet[str]:
        """The settings that were set."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What an endpoint is, for messages.

    Attributes:
        section: The section of the configuration.
        name: As in "no metrics and no health endpoint".
    """

    section: str
    name: str


METRICS = Purpose("metrics", "metrics and no health endpoint")


def is_port_chosen(configured: Address, changed: Address) -> bool:
    """Tell whether the user chose the port, in the configuration or in `on_startup`.

    Args:
        configured: The section as it was read.
        changed: The section as `on_startup` left it.
    """
    return "port" in configured.model_fields_set or changed.port != configured.port


def listen(
    settings: Address, *, is_chosen: bool, purpose: Purpose = METRICS, owners: PortOwners | None = None
) -> socket.socket | None:
    """Return a listening socket; None: all ports that may be tried are in use, which is logged.

    Args:
        settings: Where to listen.
        is_chosen: Whether the user chose the port: then no other one is tried, unless a process of the same folder
            has it.
        purpose: What listens.
        owners: Knows such processes; None: there are none.

    Raises:
        ConfigError: This machine does not have the address, or the chosen port cannot be used.
    """
    last = min(settings.port + TRIED_PORTS - 1, 65535) if settings.port else 0
    for port in range(settings.port, last + 1):
        claim = owners.claim(port) if owners is not None and port else Claim.UNKNOWN
        try:
            listener = _open_socket(settings.host, port)
        except OSError as error:
            if owners is not None:
                owners.give_up(port)
            # Whoever has a port behind the chosen one: it is as good as any other.
            is_refused = is_chosen and claim is not Claim.OTHER and port == settings.port
            if error.errno != errno.EADDRINUSE or is_refused:
                raise ConfigError(_describe_refusal(purpose.section, settings.host, port, error)) from error
            continue
        if is_chosen and port != settings.port:
            log.info(
                f"another process of this debug.db_dir has {purpose.section}.port; the next free one is taken",
                port=settings.port,
                taken=port,
            )
        return listener
    log.warning(
        f"no {purpose.name}: all ports that were tried are in use; set {purpose.section}.port, 0 for any free one",
        host=settings.host,
        ports=f"{settings.port} to {last}",
    )
    return None


def _open_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # Otherwise connections of an earlier process would keep the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _describe_refusal(section: str, host: str, port: int, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{section}.port: port {port} of {host} is in use by another process; set another port, 0 for any "
            f"free one, or {section}.enabled to false"
        )
    if error.errno == errno.EACCES:
        return f"{section}.port: this user may not listen on port {port} of {host} ({why}); set one above 1023"
    return (
        f"{section}.host: cannot listen on {host!r} ({why}); set an address of this machine, 127.0.0.1 for this "
        "machine only, or 0.0.0.0 for all of its addresses"
    )


def format_address(listener: socket.socket) -> str:
    """Return the URL under which a listener's process is reached from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - it is compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
