"""Streams recordings as a tar archive of consistent copies, with one copied period at a time on disk.

Unpacked, the archive is a folder of recordings like any other. Invariants: the archive has only copies of the given
periods; each piece is small and quickly produced; the copies are removed when the stream ends or is closed.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemill.recorder.format.file_layout import Period
from tidemill.recorder.reading.copying import copy_in_steps

#: The folder in the archive.
FOLDER = "tidemill-recordings"
PIECE_BYTES = 256 * 1024
_BLOCK = 512


def find_room(periods: Sequence[Period]) -> tuple[int, int]:
    """Return the disk space that a copy of the largest period may take, and the free space, in bytes."""
    sizes = [sum(path.lstat().st_size for path in period.list_files() if path.exists()) for period in periods]
    # This is an upper bound: sealing makes an open segment smaller, and a database may have gaps.
    return max(sizes, default=0), shutil.disk_usage(tempfile.gettempdir()).free


def stream_tar(periods: Sequence[Period]) -> Iterator[bytes]:
    """Yield an archive of some periods; b'' while no data is ready.

    Unreadable data is listed in a file `PROBLEMS.txt` of the archive.

    Raises:
        OSError: There is no disk space for the copy of a period.
    """
    problems: list[str] = []
    now = int(time.time())
    with tempfile.TemporaryDirectory(prefix="tidemill-download-") as folder:
        target = Path(folder)
        yield _describe(FOLDER, 0, now, is_folder=True)
        for period in periods:
            steps = copy_in_steps(period, target, problems)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    copy: Period = end.value
                    break
                yield b""
            yield _describe(f"{FOLDER}/{period.worker_folder.name}/{copy.name}", 0, now, is_folder=True)
            for path in sorted(copy.list_files()):
                if path.exists():
                    yield from _stream_file(path, f"{FOLDER}/{path.relative_to(target)}", now)
            shutil.rmtree(copy.worker_folder)
        if problems:
            text = "".join(f"{problem}\n" for problem in problems).encode("utf-8", "backslashreplace")
            yield _describe(f"{FOLDER}/PROBLEMS.txt", len(text), now)
            yield text + _pad(len(text))
    yield bytes(2 * _BLOCK)


def _stream_file(path: Path, name: str, now: int) -> Iterator[bytes]:
    size = path.stat().st_size
    yield _describe(name, size, now)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
    yield _pad(size)


def _describe(name: str, size: int, now: int, *, is_folder: bool = False) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, now, 0o700 if is_folder else 0o600
    if is_folder:
        info.type = tarfile.DIRTYPE
    return info.tobuf(tarfile.PAX_FORMAT)


def _pad(size: int) -> bytes:
    return bytes(-size % _BLOCK)
