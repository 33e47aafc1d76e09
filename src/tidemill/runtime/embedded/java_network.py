"""Network settings for Java processes: the environment's proxy, and the system's certificates.

Java uses neither by itself. The options are in a file that only this user can read, because they may include a proxy's
password, and a process's arguments are visible to every user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tidemill.core.errors import ConfigError
from tidemill.runtime.embedded.trust_store import read_certificates, write_trust_store
from tidemill.runtime.sockets.http_proxy import SOCKS_SCHEMES, find_proxy, lookup

#: The variable with Java's options; `@FILE` in it includes the options of a file.
_OPTIONS = "JDK_JAVA_OPTIONS"
#: Variables in which users may set a trust store or a proxy of their own.
_OWN_OPTIONS = (_OPTIONS, "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
_CONNECT_SECONDS, _READ_SECONDS = 15, 60
_DEFAULT_PORTS = {"http": 80, "https": 443}


def connected_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return a copy of `environ` in which Java uses its proxies and the system's certificates.

    Options that the user has set in Java's own variables take precedence.

    Args:
        environ: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` (or in lower case), `SSL_CERT_FILE`.
        folder: The folder for the files with options and certificates; it must outlive the process.

    Raises:
        ConfigError: A proxy's address cannot be parsed.
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
    options: dict[str, str] = {}
    for scheme in ("https", "http"):
        # In a CGI program, HTTP_PROXY in capitals may come from a request's header; this is not such a program.
        try:
            url = find_proxy(f"{scheme}://repository", {**environ, "no_proxy": "", "NO_PROXY": ""})
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if url is None:
            continue
        proxy = urlsplit(url)
        if proxy.scheme in SOCKS_SCHEMES:
            options |= _socks_options(proxy)
            continue
        options[f"{scheme}.proxyHost"] = proxy.hostname or ""
        options[f"{scheme}.proxyPort"] = str(proxy.port or _DEFAULT_PORTS[proxy.scheme])
        if proxy.username:
            # Spark's resolver reads these two for every scheme.
            options["http.proxyUser"] = unquote(proxy.username)
            options["http.proxyPassword"] = unquote(proxy.password or "")
            # Java refuses to send a password to a proxy for HTTPS unless this list is empty.
            options["jdk.http.auth.tunneling.disabledSchemes"] = ""
    if options:
        hosts = _non_proxy_hosts(lookup(environ, "no_proxy"))
        options |= {"http.nonProxyHosts": hosts, "socksNonProxyHosts": hosts}
    return options


def _socks_options(proxy: SplitResult) -> dict[str, str]:
    options = {"socksProxyHost": proxy.hostname or "", "socksProxyPort": str(proxy.port or 1080)}
    if proxy.username:
        options["java.net.socks.username"] = unquote(proxy.username)
        options["java.net.socks.password"] = unquote(proxy.password or "")
    return options


def _non_proxy_hosts(no_proxy: str) -> str:
    """Translate a list of hosts and domains; Java has no pattern for a network of addresses.

    Example:
        >>> _non_proxy_hosts("build, .corp.example, ::1")
        'localhost|127.*|[::1]|build|*.build|corp.example|*.corp.example|[::1]'
    """
    hosts = ["localhost", "127.*", "[::1]"]  # Java's own default, which this setting replaces
    for entry in (entry.strip() for entry in no_proxy.split(",")):
        address = entry.strip("[]")
        if entry == "*":
            hosts.append("*")
        elif address.count(":") > 1:
            hosts.append(f"[{address}]")
        elif host := entry.lstrip("*").lstrip(".").partition(":")[0]:
            hosts += [host, f"*.{host}"]
    return "|".join(hosts)


def _quote(option: str) -> str:
    """Quote a line for a file of Java options, in which a backslash escapes."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
