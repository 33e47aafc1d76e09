"""Downloads locked jars from a Maven repository that the user names, several at once, without Java.

A file that is cut short or temporarily refused is requested again; the caller checks its content. A user name and a
password in the address are sent to that host alone and never shown.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.jar_lock import JarLock, LockedJar, describe_download
from tidemill.runtime.embedded.trust_store import read_certificates

Progress = Callable[[str], None]

MIRROR_VARIABLE = "TIDEMILL_MAVEN_URL"
#: The name of the downloading threads, and how long they may take to end once one of them has failed.
THREAD = "tidemill-jars"
_END_SECONDS = 2.0
_CONNECTIONS = 6
_ANSWER_SECONDS = 30.0
_PROGRESS_SECONDS = 3.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_BLOCK_BYTES = 1 << 16
#: The disk of this machine is full; the server is not at fault.
_LOCAL = (errno.ENOSPC, errno.EDQUOT)
#: Statuses that may be different a moment later.
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class _CutShortError(Exception):
    """A file ended before its full length."""


class Mirror:
    """A Maven repository.

    Args:
        url: The repository's root: `https://`, `http://` or `file://`, with a user name and a password if needed.
        environ: The environment with the certificates to trust.

    Raises:
        ConfigError: The URL is not such an address.
    """

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http", "file") or not (parts.hostname or parts.scheme == "file"):
            raise ConfigError(f"{MIRROR_VARIABLE} is not the address of a Maven repository; write https://host/path")
        host = parts.netloc.rpartition("@")[2]
        #: The root URL without the password.
        self.root = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._authorization = ""
        if parts.username:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._authorization = f"Basic {base64.b64encode(secret.encode()).decode()}"
        # The same authorities as for Java; if there are none, Python uses its own.
        authorities = b"".join(read_certificates(environ)) or None
        handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authorities))
        self._opener = urllib.request.build_opener(handler)

    def download(self, jar: LockedJar, target: Path, received: Callable[[int], None], stop: threading.Event) -> None:
        """Write a jar to a file, with several attempts.

        Args:
            jar: The jar.
            target: The file.
            received: Called with the number of bytes that have arrived, negative if they have to be sent again.
            stop: Once it is set, the download stops.

        Raises:
            RemoteError: The repository does not have the jar, or refuses or fails to send it.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            count = 0

            def note(size: int) -> None:
                nonlocal count
                count += size
                received(size)

            try:
                return self._copy(jar, target, note, stop)
            except (OSError, http.client.HTTPException, _CutShortError) as error:
                if isinstance(error, OSError) and error.errno in _LOCAL:
                    raise
                if stop.is_set() or attempt == _ATTEMPTS or not _is_temporary(error):
                    raise RemoteError(f"{self.root}/{jar.repository_path}: {_describe(error)}") from error
            received(-count)
            stop.wait(_PAUSE_SECONDS * attempt)
        return None

    def _copy(self, jar: LockedJar, target: Path, note: Callable[[int], None], stop: threading.Event) -> None:
        request = urllib.request.Request(f"{self.root}/{jar.repository_path}")  # noqa: S310  # its schemes are checked
        if self._authorization:
            # Not sent to another host after a redirect.
            request.add_unredirected_header("Authorization", self._authorization)
        left = jar.size_bytes
        with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer, target.open("wb") as file:
            # Reading one byte more than expected is enough to recognise a different file.
            while left >= 0 and not stop.is_set() and (block := answer.read(min(_BLOCK_BYTES, left + 1))):
                file.write(block)
                left -= len(block)
                note(len(block))
        if left > 0 and not stop.is_set():
            raise _CutShortError(f"the file ended {left:,} bytes too early")


def download_from_mirror(lock: JarLock, scratch: Path, progress: Progress, environ: Mapping[str, str]) -> Path:
    """Download all jars of a lock and return their folder.

    Args:
        lock: The jars.
        scratch: A folder for this download alone.
        progress: Called with a line of text every few seconds.
        environ: The environment with the mirror's address.

    Raises:
        RemoteError: A jar cannot be downloaded; the text names it and the reason.
        ConfigError: The address cannot be used.
    """
    mirror = Mirror(environ[MIRROR_VARIABLE], environ)
    folder = scratch / "mirror"
    folder.mkdir()
    return _Download(lock, mirror, folder).run(progress)


class _Download:
    """The threads of one download, and how much they have received."""

    def __init__(self, lock: JarLock, mirror: Mirror, folder: Path) -> None:
        self._lock, self._mirror, self._folder = lock, mirror, folder
        self._jars: queue.SimpleQueue[LockedJar] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._received = 0
        self._counting = threading.Lock()

    def run(self, progress: Progress) -> Path:
        # The largest first, so that none of them is left for the end.
        for jar in sorted(self._lock.jars, key=lambda jar: jar.size_bytes, reverse=True):
            self._jars.put(jar)
        # Daemon threads, so that a missing answer does not keep the process from exiting.
        threads = [threading.Thread(target=self._work, name=THREAD, daemon=True) for _ in range(_CONNECTIONS)]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        waiting, told = len(threads), -_PROGRESS_SECONDS
        try:
            while waiting:
                elapsed = time.monotonic() - started
                if elapsed >= told + _PROGRESS_SECONDS:
                    progress(describe_download(self._lock, self._received, elapsed))
                    told = elapsed
                with contextlib.suppress(queue.Empty):
                    if (error := self._ends.get(timeout=_PROGRESS_SECONDS)) is not None:
                        raise error
                    waiting -= 1
        finally:
            self._stop.set()
            # A thread that still writes would keep the folder from being removed.
            deadline = time.monotonic() + _END_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return self._folder

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                jar = self._jars.get_nowait()
                self._mirror.download(jar, self._folder / jar.file_name, self._count, self._stop)
        except queue.Empty:
            self._ends.put(None)
        except Exception as error:
            self._ends.put(error)
        else:
            self._ends.put(None)

    def _count(self, size: int) -> None:
        with self._counting:
            self._received += size


def _is_temporary(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _TEMPORARY
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, (ConnectionError, TimeoutError, http.client.HTTPException, _CutShortError))


def _describe(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        hint = {
            401: f"; put a user and a password into {MIRROR_VARIABLE}: https://user:password@host/path",
            404: f"; {MIRROR_VARIABLE} must be the root of a repository that has it",
            407: "; the proxy requires a user and a password: HTTPS_PROXY=http://user:password@host:port",
        }
        return f"the answer is {error.code} {error.reason}{hint.get(error.code, '')}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({reason.verify_message}); set SSL_CERT_FILE to a file with the "
            "certificates of the authorities that this network uses"
        )
    return f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
