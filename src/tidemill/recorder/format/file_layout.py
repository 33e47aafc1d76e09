"""The files of a recording: each worker has a folder with one database and one folder of segments per period.

    <db_dir>/<group>.<worker>/<worker>-<UTC start>.db
    <db_dir>/<group>.<worker>/<worker>-<UTC start>/lock, messages-000001.open | .idx, .parquet, tasks-000001...
    <db_dir>/<group>.<worker>/<worker>-live.db -> the current database

The folder of a trigger host is `triggers.<list>.<digest>`; all hosts of a list on one machine share it.

Invariants:
- Folders have mode 0700 and files 0600; no symbolic link below `db_dir` is followed.
- A process changes a period's folder only while it holds the lock there.
- A segment's index is written before the segment; while the open and the sealed file both exist, the sealed one counts.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidemill.recorder.format.schema import RowTable
from tidemill.runtime.files.lock import HeldError, lock_file

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 100
_SEGMENT = re.compile(r"(messages|tasks)-(\d{6,12})\.(open|parquet)")
_INDEX = re.compile(r"(messages|tasks)-(\d{6,12})\.idx")
_PERIOD = re.compile(r"(.+)-(\d{8}T\d{6}Z(?:-\d+)?)\.db")
LOCK = "lock"


def name_worker_folder(group: str, worker: str) -> str:
    """Return the name of a worker's folder, with a digest where the plain name would be unsafe or ambiguous.

    A dot in the group or the worker is ambiguous, because two pairs could then share a folder.

    Example:
        >>> name_worker_folder("orders", "host-1")
        'orders.host-1'
        >>> name_worker_folder("orders.eu", "host-1"), name_worker_folder("orders", "eu.host-1")
        ('orders.eu.host-1.ad7e1960', 'orders.eu.host-1.b57de9a7')
    """
    wanted = f"{group}.{worker}"
    readable = _UNSAFE.sub("_", wanted)[:_MAX_NAME].lstrip(".") or "_"
    if readable == wanted and wanted.count(".") == 1:
        return readable
    if wanted.count(".") > 1:
        wanted = f"{len(group)}.{wanted}"
    return f"{readable}.{hashlib.blake2b(wanted.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"


def name_list_folder(list_name: str) -> str:
    """Return the name of the folder of a trigger list.

    Example:
        >>> name_list_folder("orders")
        'triggers.orders.f85164bc'
    """
    readable = _UNSAFE.sub("_", list_name)[:_MAX_NAME].strip("._") or "_"
    return f"triggers.{readable}.{hashlib.blake2b(list_name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"


def name_list_group(list_name: str) -> str:
    """Return the value that recordings of a trigger list have in place of a pipeline's consumer group."""
    return f"triggers {list_name}"


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can access, or restrict an existing one.

    Raises:
        OSError: The path is a link, a file or another user's folder, or the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private_folder(folder)
    if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
        folder.chmod(0o700)


def check_private_folder(folder: Path) -> None:
    """Check that a path is a folder of this user.

    Raises:
        OSError: The path is anything else.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, f"{folder} is not a folder")
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"{folder} belongs to another user ({status.st_uid})")


def create_file(path: Path) -> int:
    """Create a new file of mode 0600 and return its descriptor.

    Raises:
        OSError: The path exists, or the file cannot be created.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def identify_folder(folder: Path) -> str:
    """Return an opaque id that distinguishes a folder from all others on any machine; '' if the folder does not exist.

    The id changes when the machine restarts.
    """
    try:
        status = folder.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {status.st_dev} {status.st_ino}".encode(), digest_size=16).hexdigest()


class SegmentName(msgspec.Struct, frozen=True, order=True):
    """A segment of a period, numbered in order of creation."""

    number: int
    table: RowTable
    sealed: bool

    @property
    def stem(self) -> str:
        """The common part of its file names."""
        return f"{self.table}-{self.number:06d}"


class Period(msgspec.Struct, frozen=True):
    """The files of a period.

    Attributes:
        worker_folder: The folder of its worker.
        name: The name of its folder, and of its database without the suffix.
    """

    worker_folder: Path
    name: str

    @property
    def database(self) -> Path:
        """The path of its database."""
        return self.worker_folder / f"{self.name}.db"

    @property
    def folder(self) -> Path:
        """The folder of its segments."""
        return self.worker_folder / self.name

    @property
    def started(self) -> str:
        """The start of the period as written in its name."""
        found = _PERIOD.fullmatch(f"{self.name}.db")
        return found[2] if found else ""

    def list_segments(self) -> list[SegmentName]:
        """Return the segments, oldest first; a segment that is being sealed appears once."""
        found: dict[tuple[int, str], SegmentName] = {}
        with contextlib.suppress(OSError):
            check_private_folder(self.folder)
            for entry in os.scandir(self.folder):
                match = _SEGMENT.fullmatch(entry.name)
                if match is None:
                    continue
                name = SegmentName(int(match[2]), RowTable(match[1]), match[3] == "parquet")
                known = found.get((name.number, name.table))
                if known is None or not known.sealed:
                    found[name.number, name.table] = name
        return sorted(found.values())

    def list_missing(self) -> list[SegmentName]:
        """Return the segments that have an index but no rows, oldest first.

        Retention removes the index before the rows, so rows of these segments were lost.
        """
        found = []
        with contextlib.suppress(OSError):
            check_private_folder(self.folder)
            names = {entry.name for entry in os.scandir(self.folder)}
            for match in filter(None, map(_INDEX.fullmatch, names)):
                name = SegmentName(int(match[2]), RowTable(match[1]), sealed=True)
                rows = [f"{name.stem}.parquet", f"{name.stem}.open"]
                # The segment may have been sealed or removed while the folder was read, so check again.
                if names.isdisjoint(rows) and self.path_of(name, "idx").exists():
                    found += [] if any((self.folder / row).exists() for row in rows) else [name]
        return sorted(found)

    def list_files(self) -> list[Path]:
        """Return all files of the period."""
        files = [self.database.with_name(f"{self.database.name}{ending}") for ending in ("", "-wal", "-shm")]
        with contextlib.suppress(OSError):
            check_private_folder(self.folder)
            files += [Path(entry.path) for entry in os.scandir(self.folder)]
        return files

    def path_of(self, segment: SegmentName, ending: str) -> Path:
        """Return the path of a segment's file."""
        return self.folder / f"{segment.stem}.{ending}"

    def lock(self) -> int:
        """Lock the period until the returned descriptor is closed.

        Raises:
            HeldError: Another process writes to the period.
            OSError: The period cannot be locked.
        """
        check_private_folder(self.folder)
        return lock_file(self.folder / LOCK)

    def is_live(self) -> bool:
        """Return whether a process writes to the period."""
        try:
            fd = os.open(self.folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def name_start(at: float) -> str:
    """Return the form of a time used in period names, which sort by time; '' if the time is outside the calendar.

    Example:
        >>> name_start(1_800_000_000)
        '20270115T080000Z'
    """
    try:
        return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    except (OverflowError, OSError, ValueError):
        return ""


def create_period(worker_folder: Path, worker: str, now: float) -> tuple[Period, int]:
    """Create a period and lock it; returns the period and the descriptor of its lock.

    Raises:
        OSError: The files cannot be created.
    """
    start = name_start(now)
    readable = _UNSAFE.sub("_", worker)[:_MAX_NAME].lstrip(".") or "_"
    for number in range(1, 10_000):
        name = f"{readable}-{start}" if number == 1 else f"{readable}-{start}-{number}"
        period = Period(worker_folder, name)
        try:
            period.folder.mkdir(mode=0o700)
        except FileExistsError:
            continue  # the clock was set back, or another process has this name
        try:
            lock = period.lock()
        except HeldError:  # a process that looks for segments to seal has locked it
            continue
        try:
            os.close(create_file(period.database))
        except BaseException:
            os.close(lock)
            shutil.rmtree(period.folder, ignore_errors=True)
            raise
        return period, lock
    raise FileExistsError(17, f"too many periods {readable}-{start} in {worker_folder}")


def list_worker_folders(db_dir: Path) -> list[Path]:
    """Return the folders of workers; links and other users' folders are skipped."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(db_dir), key=lambda entry: entry.name):
            with contextlib.suppress(OSError):
                check_private_folder(Path(entry.path))
                found.append(Path(entry.path))
    return found


def list_periods(worker_folder: Path) -> list[Period]:
    """Return a worker's periods, oldest first, including those with segments but no database."""
    return sorted(_find_periods(worker_folder), key=lambda period: (period.started, period.name))


def _find_periods(worker_folder: Path) -> Iterator[Period]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(worker_folder):
            if entry.is_file(follow_symlinks=False) and _PERIOD.fullmatch(entry.name):
                yield Period(worker_folder, entry.name.removesuffix(".db"))
            elif entry.is_dir(follow_symlinks=False) and _PERIOD.fullmatch(f"{entry.name}.db"):
                period = Period(worker_folder, entry.name)
                # A period that is being created or removed has no segments.
                if period.list_segments() and not os.path.lexists(period.database):
                    yield period
