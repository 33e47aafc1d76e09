"""The Java libraries of an artifact: their names, versions, sizes and SHA-256 digests, from a file of the project.

A line of such a file is `group:artifact:version size_bytes sha256`; the first line is the artifact that needs the
others. Downloaded files are used only if they match exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

_BLOCK_BYTES = 1 << 20
#: How often a download without progress is reported.
_UNMOVED_SECONDS = 15.0


class LockedJar(msgspec.Struct, frozen=True):
    """One library.

    Attributes:
        group: The first part of its coordinates, for example `org.apache.kafka`.
        artifact: The second part.
        version: The third part.
        size_bytes: The current size of the file.
        sha256: The digest of the file, in lower-case hexadecimal.
    """

    group: str
    artifact: str
    version: str
    size_bytes: int
    sha256: str

    @property
    def coordinates(self) -> str:
        """`group:artifact:version`."""
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def file_name(self) -> str:
        """The file's name in a folder of jars, as Spark's resolver chooses it."""
        return f"{self.group}_{self.artifact}-{self.version}.jar"

    @property
    def repository_path(self) -> str:
        """The path below the root of a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.artifact}-{self.version}.jar"

    def find_problem(self, path: Path) -> str | None:
        """Return how a file differs from this jar, None if it does not."""
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return f"{self.coordinates} is missing"
        if size != self.size_bytes:
            return f"{self.coordinates} is {size:,} bytes long, expected {self.size_bytes:,}"
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest() != self.sha256:
            return f"{self.coordinates} has the SHA-256 {digest.hexdigest()}, expected {self.sha256}"
        return None


class JarLock(msgspec.Struct, frozen=True):
    """The libraries of one artifact.

    Attributes:
        jars: All libraries, the artifact itself first.
    """

    jars: Sequence[LockedJar]

    @property
    def coordinates(self) -> str:
        """The coordinates of the artifact."""
        return self.jars[0].coordinates

    @property
    def name(self) -> str:
        """The name of the folder for these jars."""
        return f"{self.jars[0].artifact}-{self.jars[0].version}"

    @property
    def size_bytes(self) -> int:
        """The total size of the download."""
        return sum(jar.size_bytes for jar in self.jars)

    def is_complete(self, folder: Path) -> bool:
        """Return whether a folder has every jar in its full size; fast enough for each start."""
        try:
            return all((folder / jar.file_name).stat().st_size == jar.size_bytes for jar in self.jars)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def find_problems(self, folder: Path) -> list[str]:
        """Return how the files in a folder differ from the lock, including their digests."""
        problems = (jar.find_problem(folder / jar.file_name) for jar in self.jars)
        return [problem for problem in problems if problem is not None]


def parse_jar_lock(text: str) -> JarLock:
    r"""Parse a lock file; blank lines and lines that begin with `#` are skipped.

    Example:
        >>> parse_jar_lock("# made by hand\norg.example:thing:1.0 3 00ff").jars[0].file_name
        'org.example_thing-1.0.jar'
    """
    jars = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        coordinates, size, digest = line.split()
        group, artifact, version = coordinates.split(":")
        jars.append(LockedJar(group, artifact, version, int(size), digest))
    return JarLock(jars)


def describe_download(lock: JarLock, received_bytes: int, seconds: float) -> str:
    """Return a line about a download in progress.

    Example:
        >>> lock = parse_jar_lock("org.example:thing:1.0 2500000 00ff")
        >>> describe_download(lock, 1_200_000, 3.2)
        'downloading org.example:thing:1.0 (once): 1.2 of 2.5 MB, 3 s'
    """
    # A resolver may also download files that turn out not to be needed.
    received, total = min(received_bytes, lock.size_bytes) / 1e6, lock.size_bytes / 1e6
    # A resolver reads the descriptions of all jars first, which takes a while on a slow network.
    so_far = f"{received:.1f} of {total:.1f} MB" if received_bytes else f"{total:.1f} MB, looking up the files"
    return f"downloading {lock.coordinates} (once): {so_far}, {seconds:.0f} s"


class DownloadProgress:
    """Reports a download whenever it has progressed, and occasionally that it has not.

    Args:
        lock: The jars that are downloaded.
        tell: Called with each line.

    Example:
        >>> progress = DownloadProgress(parse_jar_lock("org.example:thing:1.0 2500000 00ff"), print)
        >>> for seconds in (0, 3, 6, 9, 12, 15):
        ...     progress.update(0, seconds)
        downloading org.example:thing:1.0 (once): 2.5 MB, looking up the files, 0 s
        downloading org.example:thing:1.0 (once): 2.5 MB, looking up the files, 15 s
        >>> progress.update(1_200_000, 18)
        downloading org.example:thing:1.0 (once): 1.2 of 2.5 MB, 18 s
    """

    def __init__(self, lock: JarLock, tell: Callable[[str], None]) -> None:
        self._lock = lock
        self._tell = tell
        self._told_bytes = -1
        self._told_at = 0.0

    def update(self, received_bytes: int, seconds: float) -> None:
        """Report the progress if it has changed.

        Args:
            received_bytes: How many bytes have arrived.
            seconds: How long the download has taken so far.
        """
        received = min(received_bytes, self._lock.size_bytes)
        if received == self._told_bytes and seconds < self._told_at + _UNMOVED_SECONDS:
            return
        self._told_bytes, self._told_at = received, seconds
        self._tell(describe_download(self._lock, received, seconds))
