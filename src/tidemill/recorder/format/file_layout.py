"""The files of a recording: a folder for each worker, in it a database and a folder of segments for each period.

    <db_dir>/<group>.<worker>/<worker>-<UTC start>.db
    <db_dir>/<group>.<worker>/<worker>-<UTC start>/lock, messages-000001.open | .idx, .parquet, tasks-000001...
    <db_dir>/<group>.<worker>/<worker>-live.db -> the current one

The folder of a trigger host is `triggers.<list>.<digest>`; several hosts of a list on one machine share it.

Invariants: folders have mode 0700 and files 0600; no symbolic link below `db_dir` is followed; who writes to a period
holds the lock of its folder, and only who holds it changes what is in it. A segment's index is there before the
segment; while both the open and the sealed file of a segment are there, the sealed one counts.
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
    """Return the name of a worker's folder; names that cannot be a file's are changed, and stay different.

    A dot in a group or a worker would let two pairs have one folder: these have a digest, too.

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
    """Return what stands in recordings of a trigger list for the consumer group of a pipeline."""
    return f"triggers {list_name}"


def make_private_folder(folder: Path) -> None:
    """Create a folder that only this user can use, or make sure that it is one.

    Raises:
        OSError: It is a link, a file, another user's, or cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private_folder(folder)
    if stat.S_IMODE(folder.lstat().st_mode) != 0o700:
        folder.chmod(0o700)


def check_private_folder(folder: Path) -> None:
    """Make sure that a folder is one, and this user's.

    Raises:
        OSError: It is not.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, f"{folder} is not a folder")
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"{folder} belongs to another user ({status.st_uid})")


def create_file(path: Path) -> int:
    """Create a new file of mode 0600 and return its descriptor.

    Raises:
        OSError: There is something of this name, or it cannot be created.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def identify_folder(folder: Path) -> str:
    """Return what tells a folder from all others, on any machine; '' if it is not there.

    It says nothing about the folder, and changes when the machine is started again.
    """
    try:
        status = folder.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {status.st_dev} {status.st_ino}".encode(), digest_size=16).hexdigest()


class SegmentName(msgspec.Struct, frozen=True, order=True):
    """A segment of a period; they are numbered in the order in which they were begun."""

    number: int
    table: RowTable
    sealed: bool

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"{self.table}-{self.number:06d}"


class Period(msgspec.Struct, frozen=True):
    """The files of a period.

    Attributes:
        worker_folder: The folder of its worker.
        name: The name of its folder, and of its database without the ending.
    """

    worker_folder: Path
    name: str

    @property
    def database(self) -> Path:
        """Its database."""
        return self.worker_folder / f"{self.name}.db"

    @property
    def folder(self) -> Path:
        """The folder of its segments."""
        return self.worker_folder / self.name

    @property
    def started(self) -> str:
        """When it was begun, as its name says."""
        found = _PERIOD.fullmatch(f"{self.name}.db")
        return found[2] if found else ""

    def list_segments(self) -> list[SegmentName]:
        """Return its segments, the oldest first; of one that is being sealed only one file counts."""
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
        """Return the segments of which only the index is left, the oldest first; retention removes that before rows."""
        found = []
        with contextlib.suppress(OSError):
            check_private_folder(self.folder)
            names = {entry.name for entry in os.scandir(self.folder)}
            for match in filter(None, map(_INDEX.fullmatch, names)):
                name = SegmentName(int(match[2]), RowTable(match[1]), sealed=True)
                rows = [f"{name.stem}.parquet", f"{name.stem}.open"]
                # It may have been sealed or removed while the folder was read.
                if names.isdisjoint(rows) and self.path_of(name, "idx").exists():
                    found += [] if any((self.folder / row).exists() for row in rows) else [name]
        return sorted(found)

    def list_files(self) -> list[Path]:
        """Return all of its files."""
        files = [self.database.with_name(f"{self.database.name}{ending}") for ending in ("", "-wal", "-shm")]
        with contextlib.suppress(OSError):
            check_private_folder(self.folder)
            files += [Path(entry.path) for entry in os.scandir(self.folder)]
        return files

    def path_of(self, segment: SegmentName, ending: str) -> Path:
        """Return a file of a segment."""
        return self.folder / f"{segment.stem}.{ending}"

    def lock(self) -> int:
        """Lock it until the returned descriptor is closed.

        Raises:
            HeldError: Somebody writes to it.
            OSError: It cannot be locked.
        """
        check_private_folder(self.folder)
        return lock_file(self.folder / LOCK)

    def is_live(self) -> bool:
        """Tell whether somebody writes to it."""
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
    """Return a time as periods are named by it: later ones compare as greater; '' if no calendar has it.

    Example:
        >>> name_start(1_800_000_000)
        '20270115T080000Z'
    """
    try:
        return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    except (OverflowError, OSError, ValueError):
        return ""


def create_period(worker_folder: Path, worker: str, now: float) -> tuple[Period, int]:
    """Create a period and lock it; returns it and the descriptor of its lock.

    Raises:
        OSError: Its files cannot be created.
    """
    start = name_start(now)
    readable = _UNSAFE.sub("_", worker)[:_MAX_NAME].lstrip(".") or "_"
    for number in range(1, 10_000):
        name = f"{readable}-{start}" if number == 1 else f"{readable}-{start}-{number}"
        period = Period(worker_folder, name)
        try:
            period.folder.mkdir(mode=0o700)
        except FileExistsError:
            continue  # a clock that was set back, or another process of this name
        try:
            lock = period.lock()
        except HeldError:  # by a process that looks for what is left to seal
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
    """Return the folders of workers; what is a link, or not this user's, is none."""
    found = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(db_dir), key=lambda entry: entry.name):
            with contextlib.suppress(OSError):
                check_private_folder(Path(entry.path))
                found.append(Path(entry.path))
    return found


def list_periods(worker_folder: Path) -> list[Period]:
    """Return the periods of a worker, the oldest first; one with segments is a period without its database, too."""
    return sorted(_find_periods(worker_folder), key=lambda period: (period.started, period.name))


def _find_periods(worker_folder: Path) -> Iterator[Period]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(worker_folder):
            if entry.is_file(follow_symlinks=False) and _PERIOD.fullmatch(entry.name):
                yield Period(worker_folder, entry.name.removesuffix(".db"))
            elif entry.is_dir(follow_symlinks=False) and _PERIOD.fullmatch(f"{entry.name}.db"):
                period = Period(worker_folder, entry.name)
                # One that is being created or removed has none.
                if period.list_segments() and not os.path.lexists(period.database):
                    yield period
