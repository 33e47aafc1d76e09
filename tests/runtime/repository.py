"""A Maven repository on this machine, with a certificate authority of its own, and a proxy before it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import socket
import ssl
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import trustme

from tidemill.runtime.embedded.jar_lock import JarLock, LockedJar

#: Only the proxy knows where this is.
HOST = "repository.tidemill.test"

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>org.example</groupId><artifactId>{name}</artifactId><version>1.0</version><dependencies>{needs}</dependencies></project>
"""
_NEED = "<dependency><groupId>org.example</groupId><artifactId>{name}</artifactId><version>1.0</version></dependency>"


def make_jar(name: str, size: int = 0) -> bytes:
    """Return a jar with one entry, of `size` bytes that do not compress."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{name}.txt"), hashlib.shake_256(name.encode()).digest(size))
    return buffer.getvalue()


class Repository:
    """A server for `org.example:thing:1.0`, which needs a number of parts.

    Args:
        parts: How many.
        size: The size of each jar in bytes, about.

    Attributes:
        requests: The requested paths, in order.
        at_once: The most requests that were answered at the same time.
        judge: Called with each path and the number of requests for it; a status other than 200 is the answer, a
            negative one ends it after so many bytes, None waits until `gate` is set.
        wanted: The value of an Authorization header that every request must have; '' for none.
    """

    def __init__(self, parts: int = 1, size: int = 1000) -> None:
        """Start it."""
        names = ["thing", *(f"part-{number}" for number in range(parts))]
        self.files: dict[str, bytes] = {}
        jars = []
        for name in names:
            content, place = make_jar(name, size), f"org/example/{name}/1.0/{name}-1.0"
            needs = "".join(_NEED.format(name=part) for part in names[1:]) if name == "thing" else ""
            self.files[f"{place}.jar"] = content
            self.files[f"{place}.pom"] = _POM.format(name=name, needs=needs).encode()
            jars.append(LockedJar("org.example", name, "1.0", len(content), hashlib.sha256(content).hexdigest()))
        self.lock = JarLock(jars)
        self.authority = trustme.CA()
        self.requests: list[str] = []
        self.at_once = self._now = 0
        self.judge: Callable[[str, int], int | None] = lambda path, number: 200
        self.gate = threading.Event()
        self.wanted = ""
        self._counting = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(HOST, "localhost", "127.0.0.1").configure_cert(context)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its root, for clients that trust its authority."""
        return f"https://localhost:{self.port}/maven"

    def close(self) -> None:
        """End it."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        repository = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with repository._counting:
                    repository._now += 1
                    repository.at_once = max(repository.at_once, repository._now)
                try:
                    repository._answer(self)
                except OSError:
                    self.close_connection = True  # the client is gone
                finally:
                    with repository._counting:
                        repository._now -= 1

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                """Keep quiet."""

        return Handler

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.removeprefix("/maven/")
        self.requests.append(path)
        if self.wanted and request.headers.get("Authorization") != self.wanted:
            request.send_error(401)
            return
        content = self.files.get(path)
        if content is None:
            request.send_error(404)
            return
        verdict = self.judge(path, self.requests.count(path))
        if verdict is not None and verdict > 200:
            request.send_error(verdict)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if verdict is None:
            request.wfile.write(content[:1])
            self.gate.wait(60)
            content = content[1:]
        request.wfile.write(content[:-verdict] if verdict is not None and verdict < 0 else content)


@contextmanager
def forwarding(port: int, user: str, password: str, seen: Callable[[], None]) -> Iterator[int]:
    """Run an HTTP proxy that knows HOST, as a port of this machine, and lets one user through; yield its port.

    Args:
        port: Where connections to HOST lead.
        user: Its name.
        password: Its password.
        seen: Called for each connection that is let through.
    """
    wanted = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, client.makefile("rb") as lines, contextlib.suppress(OSError):
            first = lines.readline().decode().split()
            headers: Mapping[str, str] = {}
            while line := lines.readline().strip():
                name, _, value = line.decode().partition(":")
                headers = {**headers, name.lower(): value.strip()}
            if headers.get("proxy-authorization") != wanted:
                client.sendall(
                    b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=x\r\n"
                    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                )
                return
            if first[:2] != ["CONNECT", f"{HOST}:443"]:
                client.sendall(b"HTTP/1.1 502 No such host\r\nContent-Length: 0\r\n\r\n")
                return
            seen()
            with socket.create_connection(("127.0.0.1", port)) as server:
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                back = threading.Thread(target=copy, args=(server, client), daemon=True)
                back.start()
                copy(client, server)
                back.join()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        # Closing alone would not wake the thread that accepts.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def ivy_settings(folder: Path, root: str) -> None:
    """Write a Spark configuration folder whose resolver knows one repository."""
    settings = folder / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="own"/><resolvers>'
        f'<ibiblio name="own" m2compatible="true" root="{root}"/></resolvers></ivysettings>'
    )
    (folder / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {settings}\n")
