"""Finds the port that an endpoint listens on.

If the user chose a port, the process listens on it or does not start. The default port is only a preference, because
several pipelines may run on one machine. A chosen port is also only a preference if it belongs to a process that
records in the same folder: both processes have the same configuration, and show each other's recordings.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import structlog

from tidemill.core.errors import ConfigError
from tidemill.runtime.sockets.port_owners import PortClaim, PortOwners

log = structlog.get_logger(__name__)

#: How many ports are tried, starting with the default.
TRIED_PORTS = 20
_BACKLOG = 64


class Address(Protocol):
    """The part of a configuration section that says where to listen."""

    host: str
    port: int

    @property
    def model_fields_set(self) -> AbstractSet[str]:
        """The settings that were set."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """The purpose of an endpoint, for messages.

    Attributes:
        section: The section of the configuration.
        name: As in "no metrics and no health endpoint".
    """

    section: str
    name: str


METRICS = Purpose("metrics", "metrics and no health endpoint")


def is_port_chosen(configured: Address, changed: Address) -> bool:
    """Return whether the user chose the port, in the configuration or in `on_startup`.

    Args:
        configured: The section as it was read.
        changed: The section after `on_startup`.
    """
    return "port" in configured.model_fields_set or changed.port != configured.port


def listen(
    settings: Address, *, is_chosen: bool, purpose: Purpose = METRICS, owners: PortOwners | None = None
) -> socket.socket | None:
    """Return a listening socket; None if all ports that may be tried are in use, which is logged.

    Args:
        settings: Where to listen.
        is_chosen: Whether the user chose the port. No other port is then tried, unless a process of the same folder has
            it.
        purpose: The purpose of the endpoint.
        owners: Knows the ports of processes of the same folder; None if there are none.

    Raises:
        ConfigError: This machine does not have the address, or the chosen port cannot be used.
    """
    last = min(settings.port + TRIED_PORTS - 1, 65535) if settings.port else 0
    for port in range(settings.port, last + 1):
        claim = owners.claim(port) if owners is not None and port else PortClaim.UNKNOWN
        try:
            listener = _open_socket(settings.host, port)
        except OSError as error:
            if owners is not None:
                owners.give_up(port)
            # Ports after the chosen one are all equally good, whichever process has them.
            is_refused = is_chosen and claim is not PortClaim.OTHER and port == settings.port
            if error.errno != errno.EADDRINUSE or is_refused:
                raise ConfigError(_describe_refusal(purpose.section, settings.host, port, error)) from error
            continue
        if is_chosen and port != settings.port:
            log.info(
                f"another process with this debug.db_dir uses {purpose.section}.port; listening on the next free port",
                port=settings.port,
                taken=port,
            )
        return listener
    log.warning(
        f"no {purpose.name}: all ports tried are in use; set {purpose.section}.port, 0 for any free one",
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
        # Otherwise connections of an earlier process would block the port for a minute.
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
    """Return the URL of a listener for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - it is compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
