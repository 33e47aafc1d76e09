"""Reads one DAG file in a separate process, as seen by the manager: starts it, limits it and receives its result.

Invariants: whatever the file does, the call returns shortly after the time limit at the latest, and then no process of
the group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tidemill.services.parser.program import LENGTH_BYTES, ParseRequest, ParseResult
from tidemill.services.zygote.link import ForkedProcess

#: The function that the zygote calls in the process.
TARGET: Final = "tidemill.services.parser.program:parse"
#: Modules that the zygote imports for it.
PRELOAD: Final = (
    "tidemill.services.parser.program",
    "tidemill.dags.structure.building",
    "tidemill.dags.decorators",
    "tidemill.dags.loading",
    "tidemill.dags.operators.python",
    "tidemill.services.parser.thread_watch",
    "tidemill.services.worker.task.residue",
)
#: Larger results are rejected.
MAX_RESULT_BYTES: Final = 256 << 20
#: Output of a file beyond this is dropped.
MAX_OUTPUT_BYTES: Final = 64 << 10
#: The time between the time limit and the kill, in which the process writes its traceback.
GRACE_SECONDS: Final = 0.5
_CHUNK: Final = 1 << 16
_RESULTS: Final = msgspec.msgpack.Decoder(ParseResult)


class Forker(Protocol):
    """Starts processes: a `services.zygote.client.ZygoteClient`."""

    async def fork(self, target: str, request: bytes = b"", fds: tuple[int, ...] = ()) -> ForkedProcess:
        """Start a process."""
        ...

    def signal(self, process: ForkedProcess, number: signal.Signals | int, *, group: bool = False) -> None:
        """Send a signal to a process."""
        ...


class FileReading(msgspec.Struct, frozen=True):
    """The outcome of reading a file.

    Attributes:
        result: The result; None if the process ended before it.
        error: The error; None if there is none.
        output: The output of the file.
        cpu_seconds: The CPU time.
    """

    result: ParseResult | None
    error: str | None
    output: str
    cpu_seconds: float = 0.0


async def read_file(forker: Forker, path: Path, folder: Path, timeout_seconds: float) -> FileReading:
    """Read a DAG file.

    Args:
        forker: Starts the process.
        path: The file.
        folder: The folder of DAG files.
        timeout_seconds: The time limit.

    Raises:
        RemoteError: No process could be started; the file is not the cause.
    """
    with contextlib.ExitStack() as closing:
        result_pipe = closing.enter_context(contextlib.closing(_Pipe(LENGTH_BYTES + MAX_RESULT_BYTES)))
        output_pipe = closing.enter_context(contextlib.closing(_Pipe(MAX_OUTPUT_BYTES)))
        request = msgspec.msgpack.encode(ParseRequest(str(path), str(folder), timeout_seconds))
        process = await forker.fork(TARGET, request, (result_pipe.writer, output_pipe.writer))
        result_pipe.close_writer()
        output_pipe.close_writer()
        timed_out = not await _wait(forker, process, timeout_seconds + GRACE_SECONDS)
        exited = await process.ended
        # The whole group has ended, so all its output is in the pipes.
        output = output_pipe.read_rest().decode(errors="replace").replace("\0", "\\x00")
        result = _decode(result_pipe.read_rest())
    cpu_seconds = (exited.user_us + exited.system_us) / 1e6
    if result is not None:
        return FileReading(result, result.error, output, cpu_seconds)
    error = _describe_end(exited.status, timeout_seconds if timed_out else None, output)
    return FileReading(None, error, output, cpu_seconds)


async def _wait(forker: Forker, process: ForkedProcess, seconds: float) -> bool:
    """Wait until a process has ended; returns False if it was killed at the time limit."""
    try:
        await asyncio.wait_for(asyncio.shield(process.ended), seconds)
    except TimeoutError:
        forker.signal(process, signal.SIGKILL, group=True)
        return False
    except asyncio.CancelledError:
        forker.signal(process, signal.SIGKILL, group=True)
        raise
    return True


def _describe_end(status: int, timeout_seconds: float | None, output: str) -> str:
    """Return why there is no result."""
    said = f"\nIts last output:\n{output[-4000:].rstrip()}" if output.strip() else ""
    if timeout_seconds is not None:
        return (
            f"reading the file took longer than {timeout_seconds:g} s, so its process was killed; move slow work into "
            f"tasks, or raise dags.parse_timeout_seconds{said}"
        )
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the process that read the file was killed by {signal.Signals(-status).name}{said}"
    return f"the process that read the file ended with status {status} before the end of the file{said}"


def _decode(data: bytes) -> ParseResult | None:
    length = int.from_bytes(data[:LENGTH_BYTES])
    if len(data) < LENGTH_BYTES or len(data) - LENGTH_BYTES != length:
        return None
    try:
        return _RESULTS.decode(data[LENGTH_BYTES:])
    except msgspec.MsgspecError:
        return None


class _Pipe:
    """The reading end of a pipe; stores data up to a limit and drops the rest."""

    def __init__(self, limit_bytes: int) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._size_bytes = 0
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def read_rest(self) -> bytes:
        """Return the data, after all writers have closed their ends."""
        while self._read():
            pass
        return b"".join(self._parts)

    def close(self) -> None:
        self.close_writer()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)

    def _read(self) -> bool:
        """Read a chunk; returns False if there is none at the moment."""
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._reader)
            return False
        room = self._limit_bytes - self._size_bytes
        if room > 0:
            self._parts.append(data[:room])
            self._size_bytes += len(data[:room])
        return True
