"""Reads one DAG file in a process of its own, from the manager's side: starts it, limits it, takes its result.

Invariants: the call returns, whatever the file does, shortly after the time limit at the latest; then nothing of the
process group is left.
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

#: What a zygote calls in the process.
TARGET: Final = "tidemill.services.parser.program:parse"
#: What a zygote imports for it.
PRELOAD: Final = (
    "tidemill.services.parser.program",
    "tidemill.dags.building",
    "tidemill.dags.decorators",
    "tidemill.dags.loading",
    "tidemill.dags.operators.python",
    "tidemill.services.parser.thread_watch",
    "tidemill.services.worker.residue",
)
#: A result beyond this is not read.
MAX_RESULT_BYTES: Final = 256 << 20
#: What a file prints beyond this is left out.
MAX_OUTPUT_BYTES: Final = 64 << 10
#: How long after the time limit the process is killed: it writes down where it hangs meanwhile.
GRACE_SECONDS: Final = 0.5
_CHUNK: Final = 1 << 16
_RESULTS: Final = msgspec.msgpack.Decoder(ParseResult)


class Forker(Protocol):
    """What starts processes: a `services.zygote.client.ZygoteClient`."""

    async def fork(self, target: str, request: bytes = b"", fds: tuple[int, ...] = ()) -> ForkedProcess:
        """Start a process."""
        ...

    def signal(self, process: ForkedProcess, number: signal.Signals | int, *, group: bool = False) -> None:
        """Send it a signal."""
        ...


class FileReading(msgspec.Struct, frozen=True):
    """What came of reading a file.

    Attributes:
        result: None: the process did not get that far.
        error: Why it cannot be read.
        output: What it printed.
        cpu_seconds: What it cost.
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
        timeout_seconds: How long it may take.

    Raises:
        RemoteError: No process could be started; the file is not to blame.
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
        # All of the group is gone: what was written is there to be read.
        output = output_pipe.read_rest().decode(errors="replace").replace("\0", "\\x00")
        result = _decode(result_pipe.read_rest())
    cpu_seconds = (exited.user_us + exited.system_us) / 1e6
    if result is not None:
        return FileReading(result, result.error, output, cpu_seconds)
    error = _describe_end(exited.status, timeout_seconds if timed_out else None, output)
    return FileReading(None, error, output, cpu_seconds)


async def _wait(forker: Forker, process: ForkedProcess, seconds: float) -> bool:
    """Wait until a process has ended; False: it did not, and was killed."""
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
    said = f"\nIt printed last:\n{output[-4000:].rstrip()}" if output.strip() else ""
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
    """The reading end of a pipe: keeps what comes, up to a limit, and throws the rest away."""

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
        """Return what came, once nobody writes any more."""
        while self._read():
            pass
        return b"".join(self._parts)

    def close(self) -> None:
        self.close_writer()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)

    def _read(self) -> bool:
        """Read a piece; False: there is none now."""
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
