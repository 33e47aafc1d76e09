"""By which host names and from which origins the web UI may be used.

A page elsewhere must not be able to use a reader's login (same origin), nor to reach a server on loopback by a name of
its own that it has pointed there (Host).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.config.web_settings import is_loopback


def split_host(text: str) -> str:
    """Return the name in a Host header, without the port, in lower case; '' if it is malformed.

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
    """Decides about names and origins.

    Args:
        host: The address that is listened on.
        debug_url: The address outside; ''.
        allowed_hosts: Further names.
    """

    host: str
    debug_url: str = ""
    allowed_hosts: tuple[str, ...] = ()

    def is_host(self, header: str) -> bool:
        """Tell whether a request may name this host."""
        host = split_host(header)
        if not host:
            return False
        allowed = {self.host.lower(), *(name.lower() for name in self.allowed_hosts)}
        outside = urlsplit(self.debug_url).hostname if self.debug_url else None
        return is_loopback(host) or host in allowed or host == outside

    def is_same(self, origin: str, host_header: str) -> bool:
        """Tell whether a change may come from a page of this origin.

        Args:
            origin: The header that browsers send with every change.
            host_header: The host that the request names.
        """
        outside = _strip(self.debug_url)
        return origin.lower() in {f"http://{host_header}".lower(), outside} - {""}

    @property
    def prefix(self) -> str:
        """The path before all others, as in '/tidemill'; ''."""
        return urlsplit(self.debug_url).path.rstrip("/")

    @property
    def is_secure(self) -> bool:
        """Whether browsers use https."""
        return self.debug_url.lower().startswith("https://")
