"""Who may use the web UI, and links to other places: parts of the section `debug`."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from tidemill.config.section import NonEmpty, Section

_ARGON2 = re.compile(r"\$argon2id\$v=\d+\$m=\d+,t=\d+,p=\d+\$[A-Za-z0-9+/]+\$[A-Za-z0-9+/]+")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,1000}")
_LABEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTERVAL = re.compile(r"(?=\d)(?:[1-9]\d{0,5}(?:ms|[smhdwy])){1,6}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _check_password_hash(value: str) -> str:
    if not _ARGON2.fullmatch(value):
        raise ValueError("expected what `tidemill config hash` prints for a password ($argon2id$...)")
    return value


def _check_token_hash(value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError("expected what `tidemill config hash --token` prints: 64 hexadecimal digits")
    return value


def check_url(value: str) -> str:
    """Return an address that a browser may be sent to; '' is none.

    Raises:
        ValueError: It is not an http or https address, or names a user.
    """
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if value and not usable:
        raise ValueError("expected an address that begins with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("expected an address without a user or password: everybody who sees the link would see them")
    return value


def _check_label_name(value: str) -> str:
    if value and not _LABEL_NAME.fullmatch(value):
        raise ValueError("expected the name of a Prometheus label: letters, digits and _, not beginning with a digit")
    return value


def _check_interval(value: str) -> str:
    if not _INTERVAL.fullmatch(value):
        raise ValueError("expected a duration as Prometheus writes it, for example 5m or 1h30m")
    return value


def _check_token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError("expected the token that `tidemill config hash --token` prints beside its hash")
    return value


PrometheusLabel = Annotated[str, AfterValidator(_check_label_name)]
PrometheusInterval = Annotated[str, AfterValidator(_check_interval)]
WebUrl = Annotated[str, AfterValidator(check_url)]
Role = Annotated[
    Literal["read", "operate"], Field(description="read: sees everything; operate: may also change something.")
]


class UserSettings(Section):
    """Someone who logs in with a password."""

    hash: Annotated[str, AfterValidator(_check_password_hash)] = Field(
        description="The password's hash, from `tidemill config hash`."
    )
    role: Role = "read"


class TokenSettings(Section):
    """A program that sends a token."""

    hash: Annotated[str, AfterValidator(_check_token_hash)] = Field(
        description="The token's hash, from `tidemill config hash --token`."
    )
    role: Role = "read"


class LinkSettings(Section):
    """A link in the web UI."""

    name: NonEmpty = Field(description="What it is called.")
    url: Annotated[NonEmpty, AfterValidator(check_url)] = Field(description="Where it leads: http or https.")


class PeerSettings(Section):
    """The web UI of another host."""

    url: Annotated[NonEmpty, AfterValidator(check_url)] = Field(
        description="Its address as this host reaches it: http or https, a path if it has one."
    )
    token: Annotated[str, AfterValidator(_check_token)] = Field(
        description="A token of its debug.tokens; role read is enough. It is sent there only."
    )


def is_loopback(host: str) -> bool:
    """Tell whether a name or an address is this machine's loopback.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
