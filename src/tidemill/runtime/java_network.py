"""How a Java process gets through to the network from here: the environment's proxy, and the system's certificates.

Java knows neither by itself. The options are in a file that only this user can read, because a proxy's password may be
among them and a process's arguments are visible to everybody.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tidemill.core.errors import ConfigError
from tidemill.runtime.trust_store import read_certificates, write_trust_store

#: Where Java looks for options; `@FILE` among them stands for what is in the file.
_OPTIONS = "JDK_JAVA_OPTIONS"
#: Variables whose options are the user's own choice of a trust store or a proxy.
_OWN_OPTIONS = (_OPTIONS, "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
_CONNECT_SECONDS, _READ_SECONDS = 15, 60
_DEFAULT_PORTS = {"http": 80, "https": 443}


def connected_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return a copy of `environ` in which Java uses its proxies and the system's certificates.

    What the user has set in Java's own variables is left as it is.

    Args:
        environ: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` (or in lower case), `SSL_CERT_FILE`.
        folder: For the files with the options and the certificates; it must last as long as the process.

    Raises:
        ConfigError: A proxy's address cannot be read.
    """
    own = " ".join(environ.get(name, "") for name in _OWN_OPTIONS)
    options = {
        "sun.net.client.defaultConnectTimeout": str(_CONNECT_SECONDS * 1000),
        "sun.net.client.defaultReadTimeout": str(_READ_SECONDS * 1000),
    }
    if "proxyHost" not in own:
        options |= _proxy_options(environ)
    if "javax.net.ssl.trustStore" not in own and (certificates := read_certificates(environ)):
        store = folder / "trusted.jks"
        write_trust_store(certificates, store)
        options |= {"javax.net.ssl.trustStore": str(store), "javax.net.ssl.trustStoreType": "JKS"}
    file = folder / "java.options"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as output:
        output.writelines(f"{_quote(f'-D{name}={value}')}\n" for name, value in options.items())
    return {**environ, _OPTIONS: f'{environ.get(_OPTIONS, "")} "@{file}"'.strip()}


def _proxy_options(environ: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for scheme in ("https", "http"):
        # A capital HTTP_PROXY may come from the header of a request, in a program that serves some; this one does not.
        url = _lookup(environ, f"{scheme}_proxy") or _lookup(environ, "all_proxy")
        if not url:
            continue
        proxy = _split(url, f"{scheme}_proxy")
        options[f"{scheme}.proxyHost"] = proxy.hostname or ""
        options[f"{scheme}.proxyPort"] = str(proxy.port or _DEFAULT_PORTS.get(proxy.scheme, 80))
        if proxy.username:
            # Spark's resolver reads these two for every scheme.
            options["http.proxyUser"] = unquote(proxy.username)
            options["http.proxyPassword"] = unquote(proxy.password or "")
            # Java refuses to send a password to a proxy for HTTPS unless this list is empty.
            options["jdk.http.auth.tunneling.disabledSchemes"] = ""
    if options:
        options["http.nonProxyHosts"] = _non_proxy_hosts(_lookup(environ, "no_proxy"))
    return options


def _lookup(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper(), "")


def _split(url: str, name: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.hostname and parts.port != 0 and parts.scheme in _DEFAULT_PORTS:
            return parts
    except ValueError:
        pass  # a port that is not a number
    # Not the value: there may be a password in it.
    raise ConfigError(f"{name.upper()} is not the address of an HTTP proxy; write it as http://host:port")


def _non_proxy_hosts(no_proxy: str) -> str:
    """Translate a list of hosts and domains.

    Example:
        >>> _non_proxy_hosts("build, .corp.example")
        'localhost|127.*|[::1]|build|*.build|corp.example|*.corp.example'
    """
    hosts = ["localhost", "127.*", "[::1]"]  # what Java would never use a proxy for if this were not set
    for entry in no_proxy.split(","):
        host = entry.strip().lstrip("*").lstrip(".").partition(":")[0]
        if entry.strip() == "*":
            hosts.append("*")
        elif host:
            hosts += [host, f"*.{host}"]
    return "|".join(hosts)


def _quote(option: str) -> str:
    """Quote a line for a file of Java options, in which a backslash escapes."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
