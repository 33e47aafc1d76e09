"""The protocol of resident programs: encodes requests, and decodes answers from the bytes of their output.

json: one line in each direction, `{"id": 7, "args": ["-n"], "stdin": "text"}` and `{"id": 7, "stdout": "text"}`. The
answer's `stdout` may be any JSON value; a value other than a string is the output verbatim. `stderr` (text) and
`exit_code` are optional.

length: frames, in each direction a length of four bytes (unsigned, big endian) and that many bytes: a line of JSON as
above but without `stdin` or `stdout`, a line feed, and then the raw bytes of `stdin` or `stdout`.

Invariants: no I/O. Invalid answers are detected where they are read. Each answer carries the number of its request;
otherwise a stray line would shift every later answer to another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.runtime.framing import FrameSplitter, FrameTooLargeError, add_length

#: An answer may have this many bytes of JSON in addition to the output itself.
SLACK_BYTES = 65_536
#: The maximum number of bytes that JSON needs for one byte of output (as \u0000).
_ESCAPE = 6
_QUOTE = ord('"')


class FramingError(Exception):
    """A program's output is not a valid answer; the text says why."""


class TooMuchError(Exception):
    """An answer exceeds the limit for outputs."""


class ResidentAnswer(msgspec.Struct):
    """A program's answer.

    Attributes:
        id: The request's number.
        stdout: The output.
        stderr: The text that it reports as standard error.
        exit_code: 0 means success.
    """

    id: int
    stdout: bytes
    stderr: str
    exit_code: int


class _Line(msgspec.Struct):
    id: int
    stdout: msgspec.Raw = msgspec.Raw(b'""')
    stderr: str = ""
    exit_code: int = 0


class _Header(msgspec.Struct):
    id: int
    stderr: str = ""
    exit_code: int = 0


class _Request(msgspec.Struct):
    id: int
    args: Sequence[str]
    stdin: str


class _RequestHeader(msgspec.Struct):
    id: int
    args: Sequence[str]


class FrameReader(Protocol):
    """Assembles the answers of one copy from the chunks that arrive."""

    def feed(self, chunk: bytes) -> list[ResidentAnswer]:
        """Add a chunk; return the answers that it completes.

        Raises:
            FramingError: The bytes are not a valid answer.
            TooMuchError: An answer exceeds the limit.
        """

    @property
    def is_amid(self) -> bool:
        """Whether an answer has started and not ended."""


class JsonLines:
    """One JSON document per line."""

    def __init__(self, max_stdout_bytes: int) -> None:
        self._max_bytes = max_stdout_bytes
        self._encode = msgspec.json.Encoder().encode

    def make_request(self, number: int, args: Sequence[str], stdin: bytes) -> bytes:
        """Return the bytes of a request.

        Raises:
            ValueError: The input or an argument is not UTF-8.
        """
        try:
            text = stdin.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is not UTF-8 ({error}): set executor.resident.framing to length") from None
        return self._encode(_Request(number, args, text)) + b"\n"

    def make_reader(self) -> FrameReader:
        """Return a reader for a new copy."""
        return _LineReader(self._max_bytes)


class LengthFrames:
    """Length-prefixed frames, each a line of JSON followed by raw bytes."""

    def __init__(self, max_stdout_bytes: int) -> None:
        self._max_bytes = max_stdout_bytes
        self._encode = msgspec.json.Encoder().encode

    def make_request(self, number: int, args: Sequence[str], stdin: bytes) -> bytes:
        """Return the bytes of a request.

        Raises:
            ValueError: An argument is not UTF-8, or the frame is too long for the length field.
        """
        header = self._encode(_RequestHeader(number, args))
        size = len(header) + 1 + len(stdin)
        if size > 0xFFFFFFFF:
            raise ValueError(f"a request of {size} bytes is too long for a frame")
        return add_length(header, b"\n", stdin)

    def make_reader(self) -> FrameReader:
        """Return a reader for a new copy."""
        return _FrameReader(self._max_bytes)


Framing = JsonLines | LengthFrames


def make_framing(name: str, max_stdout_bytes: int) -> Framing:
    """Return the framing that `executor.resident.framing` names."""
    return LengthFrames(max_stdout_bytes) if name == "length" else JsonLines(max_stdout_bytes)


class _LineReader:
    __slots__ = ("_chunks", "_max_bytes", "_size")

    _decode = msgspec.json.Decoder(_Line).decode

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def is_amid(self) -> bool:
        return bool(self._chunks)

    def feed(self, chunk: bytes) -> list[ResidentAnswer]:
        if not chunk.endswith(b"\n"):
            self._chunks.append(chunk)
            self._size += len(chunk)
            if b"\n" not in chunk:
                if self._size > self._max_bytes * _ESCAPE + SLACK_BYTES:
                    raise TooMuchError
                return []
        whole = chunk
        if self._chunks:
            if self._chunks[-1] is not chunk:
                self._chunks.append(chunk)
            whole = b"".join(self._chunks)
            self._chunks, self._size = [], 0
        lines = whole.split(b"\n")
        rest = lines.pop()
        if rest:
            self._chunks, self._size = [rest], len(rest)
        return [self._answer(line) for line in lines]

    def _answer(self, line: bytes) -> ResidentAnswer:
        try:
            found = self._decode(line)
            stdout = _decode_output(found.stdout)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise FramingError(f"it wrote {_show(line)}, which is not a valid answer: {error}") from None
        if len(stdout) > self._max_bytes:
            raise TooMuchError
        return ResidentAnswer(found.id, stdout, found.stderr, found.exit_code)


def _decode_output(raw: msgspec.Raw) -> bytes:
    view = memoryview(raw)
    if view[0] != _QUOTE:
        return bytes(view)
    return msgspec.json.decode(view, type=str).encode()


class _FrameReader:
    __slots__ = ("_frames", "_max_bytes")

    _decode = msgspec.json.Decoder(_Header).decode

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames = FrameSplitter(max_bytes + SLACK_BYTES)

    @property
    def is_amid(self) -> bool:
        return self._frames.is_amid

    def feed(self, chunk: bytes) -> list[ResidentAnswer]:
        try:
            return [self._answer(frame) for frame in self._frames.feed(chunk)]
        except FrameTooLargeError:
            raise TooMuchError from None

    def _answer(self, frame: bytes) -> ResidentAnswer:
        header, feed, stdout = frame.partition(b"\n")
        try:
            found = self._decode(header)
        except msgspec.MsgspecError as error:
            raise FramingError(f"its frame starts with {_show(header)}, which is not a valid answer: {error}") from None
        if not feed:
            raise FramingError(f"its frame {_show(header)} has no line feed after the JSON")
        if len(stdout) > self._max_bytes:
            raise TooMuchError
        return ResidentAnswer(found.id, stdout, found.stderr, found.exit_code)


def _show(data: bytes) -> str:
    return repr(data[:200])[1:]
