"""Parts of the section `debug`: users, tokens, and links of the web UI."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from tidemill.config.sections.section import NonEmpty, Section

_ARGON2 = re.compile(r"\$argon2id\$v=\d+\$m=\d+,t=\d+,p=\d+\$[A-Za-z0-9+/]+\$[A-Za-z0-9+/]+")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,1000}")
_LABEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTERVAL = re.compile(r"(?=\d)(?:[1-9]\d{0,5}(?:ms|[smhdwy])){1,6}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _check_password_hash(value: str) -> str:
    if not _ARGON2.fullmatch(value):
        raise ValueError("expected a password hash ($argon2id$...); `tidemill config hash` prints one")
    return value


def _check_token_hash(value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError("expected a token hash (64 hexadecimal digits); `tidemill config hash --token` prints one")
    return value


def check_url(value: str) -> str:
    """Return a URL to which a browser may be sent; '' stands for none.

    Raises:
        ValueError: It is not an http or https URL, or contains a user.
    """
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if value and not usable:
        raise ValueError("expected a URL that begins with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("expected a URL without user and password, since everyone who sees the link would see them")
    return value


def _check_label_name(value: str) -> str:
    if value and not _LABEL_NAME.fullmatch(value):
        raise ValueError("expected the name of a Prometheus label: letters, digits and _, not beginning with a digit")
    return value


def _check_interval(value: str) -> str:
    if not _INTERVAL.fullmatch(value):
        raise ValueError("expected a Prometheus duration, for example 5m or 1h30m")
    return value


def _check_token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError("expected a token; `tidemill config hash --token` prints one with its hash")
    return value


PrometheusLabel = Annotated[str, AfterValidator(_check_label_name)]
PrometheusInterval = Annotated[str, AfterValidator(_check_interval)]
WebUrl = Annotated[str, AfterValidator(check_url)]
Role = Annotated[
    Literal["read", "operate"], Field(description="read: may see everything; operate: may also make changes.")
]


class UserSettings(Section):
    """A user who logs in with a password."""

    hash: Annotated[str, AfterValidator(_check_password_hash)] = Field(
        description="The password's hash, from `tidemill config hash`."
    )
    role: Role = "read"


class TokenSettings(Section):
    """A program that authenticates with a token."""

    hash: Annotated[str, AfterValidator(_check_token_hash)] = Field(
        description="The token's hash, from `tidemill config hash --token`."
    )
    role: Role = "read"


class LinkSettings(Section):
    """An additional link in the web UI."""

    name: NonEmpty = Field(description="The text of the link.")
    url: Annotated[NonEmpty, AfterValidator(check_url)] = Field(description="The target of the link: http or https.")


class PeerSettings(Section):
    """The web UI of another host."""

    url: Annotated[NonEmpty, AfterValidator(check_url)] = Field(
        description="Its address as seen from this host: http or https, with its path if it has one."
    )
    token: Annotated[str, AfterValidator(_check_token)] = Field(
        description="One of its debug.tokens; the role read is enough. The token is sent only to this address."
    )


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is this machine's loopback.

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
