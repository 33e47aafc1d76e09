"""Decides which host names and origins may use the web UI.

A foreign page must not use a reader's login (same origin), and must not reach a server on loopback through DNS
rebinding (Host).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.config.sections.web_settings import is_loopback


def split_host(text: str) -> str:
    """Return the host name in a Host header, in lower case and without the port; '' if the header is malformed.

    Example:
        >>> split_host("Localhost:8080"), split_host("[::1]:8080"), split_host("a b")
        ('localhost', '::1', '')
    """
    if not text or any(char in text for char in " /@?#\\,"):
        return ""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "").rstrip(".")


def _strip(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower() if url else ""


@dataclass(frozen=True, slots=True)
class Origins:
    """Checks host names and origins.

    Args:
        host: The address that the server listens on.
        debug_url: The public address; may be ''.
        allowed_hosts: Further allowed host names.
    """

    host: str
    debug_url: str = ""
    allowed_hosts: tuple[str, ...] = ()

    def is_host(self, header: str) -> bool:
        """Return whether a Host header is allowed."""
        host = split_host(header)
        if not host:
            return False
        allowed = {self.host.lower(), *(name.lower() for name in self.allowed_hosts)}
        outside = urlsplit(self.debug_url).hostname if self.debug_url else None
        return is_loopback(host) or host in allowed or host == outside

    def is_same(self, origin: str, host_header: str) -> bool:
        """Return whether a change may come from a page of this origin.

        Args:
            origin: The Origin header, which browsers send with every change.
            host_header: The Host header.
        """
        outside = _strip(self.debug_url)
        return origin.lower() in {f"http://{host_header}".lower(), outside} - {""}

    @property
    def prefix(self) -> str:
        """The path in front of every path of the server, as in '/tidemill'; may be ''."""
        return urlsplit(self.debug_url).path.rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether browsers use https."""
        return self.debug_url.lower().startswith("https://")
