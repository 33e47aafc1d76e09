"""The file of a segment that is being written; it is read back when the segment is sealed.

Invariant: the file has complete frames only; the rest of a failed write is truncated.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.recorder.format.file_layout import create_file
from tidemill.recorder.format.frames import MAGIC, DamagedSegmentError, FrameInfo, pack_frame, read_frames
from tidemill.recorder.format.schema import RowTable, decode_rows

if TYPE_CHECKING:
    import pyarrow as pa


#: Tests replace this to simulate a full disk.
write = os.write


class OpenSegment:
    """A file of frames that this process writes and has locked.

    Args:
        path: The file, which must not exist.
        clock: Returns seconds of a monotonic clock.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.path = path
        self.rows = 0
        #: The size of the decoded rows.
        self.rows_bytes = 0
        #: The current size of the file.
        self.size_bytes = len(MAGIC)
        self._dirty = True
        self._fd = create_file(path)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self._fd, MAGIC)
        except BaseException:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    @property
    def age_seconds(self) -> float:
        """The time since the first row was written."""
        return self._clock() - self._began

    def append(self, frames: Sequence[tuple[FrameInfo, bytes, pa.RecordBatch]]) -> None:
        """Write all of the frames, or none.

        Raises:
            OSError: The write fails.
        """
        data = b"".join(pack_frame(info, body) for info, body, _ in frames)
        try:
            _write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            os.lseek(self._fd, self.size_bytes, os.SEEK_SET)
            raise
        if not self.rows:
            self._began = self._clock()
        self.size_bytes += len(data)
        self._dirty = True
        for _, _, batch in frames:
            self.rows += len(batch)
            self.rows_bytes += batch.nbytes

    def read_batches(self, table: RowTable) -> Iterator[tuple[FrameInfo, pa.RecordBatch]]:
        """Yield the rows, read back from the file so that they need no memory until then; works even if the file was
        removed.

        Raises:
            OSError: The file is damaged or cannot be read.
        """
        try:
            for frame in read_frames(_WrittenBytes(self._fd, self.size_bytes)):
                yield frame.info, decode_rows(table, frame.body)
        except (DamagedSegmentError, ValueError) as error:
            raise OSError(f"{self.path} is damaged: {error}") from error

    def flush(self) -> None:
        """Force written data to disk.

        Raises:
            OSError: The write fails.
        """
        if self._dirty:
            os.fdatasync(self._fd)
            self._dirty = False

    def close(self) -> None:
        """Close the file and leave it as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _WrittenBytes:
    """The data written to an open file, whether or not the file still has a name; a `ByteView`."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice, /) -> memoryview:
        start, end, _ = wanted.indices(self._size)
        data = os.pread(self._fd, end - start, start)
        if len(data) < end - start:
            raise OSError("the file was truncated")
        return memoryview(data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]
