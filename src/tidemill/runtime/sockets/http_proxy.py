"""Chooses the proxy for a request, from the environment's variables.

Clients read these variables in their own ways, and some fail at their creation on an address in `NO_PROXY` that is
unrelated to the request. This module matches one request's host, as curl and Go do: names with their subdomains,
addresses, and networks such as `fd00::/8`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

#: curl's names for these schemes.
SOCKS_SCHEMES = frozenset({"socks5", "socks5h"})


def find_proxy(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the proxy for a request, None if it goes directly to its host.

    Args:
        url: The URL of the request.
        environ: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`; the same names in lower case take precedence.

    Raises:
        ValueError: The address of the proxy cannot be parsed. The text names the variable, not its value, which may
            contain a password.
    """
    parts = urlsplit(url)
    if bypasses(parts, lookup(environ, "no_proxy")):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        if proxy := lookup(environ, name):
            return _check_proxy(proxy if "://" in proxy else f"http://{proxy}", name)
    return None


def lookup(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that may be written in lower or in upper case; empty if it is not set."""
    return environ.get(name) or environ.get(name.upper(), "")


def bypasses(url: SplitResult, no_proxy: str) -> bool:
    """Return whether a list of hosts contains the host of a URL, so that it needs no proxy.

    Example:
        >>> bypasses(urlsplit("http://[::1]:8080"), "build, [::1]"), bypasses(urlsplit("http://a.corp"), ".corp")
        (True, True)
        >>> bypasses(urlsplit("http://10.1.2.3"), "10.0.0.0/8"), bypasses(urlsplit("http://mycorp"), "corp")
        (True, False)
    """
    host = (url.hostname or "").rstrip(".")
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    entries = [entry.strip().lower() for entry in no_proxy.split(",")]
    return any(entry == "*" or _matches(host, port, entry) for entry in entries if entry)


def _matches(host: str, port: int | None, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass  # one of them is a name, or has a port
    name, separator, wanted = entry.rpartition(":")
    if separator and wanted.isdigit():
        if int(wanted) != port:
            return False
        entry = name.strip("[]")
    name = entry.removeprefix("*").removeprefix(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _check_proxy(url: str, name: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and parts.scheme in {"http", "https", *SOCKS_SCHEMES}:
            return url
    except ValueError:
        pass  # a port that is not a number
    raise ValueError(
        f"{name.upper()} is not the address of a proxy; write it as http://host:port or "
        "socks5://host:port, with an IPv6 address in brackets"
    )
