"""Frames in a stream of bytes: each is a body after its length in four bytes (unsigned, big endian)."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

#: The length in front of a body.
LENGTH = struct.Struct(">I")


class FrameTooLargeError(ValueError):
    """A frame announces more bytes than its reader accepts; the rest of the stream cannot be understood."""


def add_length(*parts: bytes) -> bytes:
    r"""Return a frame of these parts.

    Example:
        >>> add_length(b"ab", b"c")
        b'\x00\x00\x00\x03abc'
    """
    return b"".join((LENGTH.pack(sum(map(len, parts))), *parts))


async def read_body(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Read the body of the next frame.

    Raises:
        asyncio.IncompleteReadError: The stream ended.
        FrameTooLargeError: The body has more than `limit` bytes.
    """
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > limit:
        raise FrameTooLargeError(f"a frame of {size} bytes is too large")
    return await reader.readexactly(size)


class FrameSplitter:
    r"""Splits a stream that arrives in chunks into the bodies of its frames.

    Args:
        limit: The maximum size of a body, in bytes.

    Example:
        >>> splitter = FrameSplitter(100)
        >>> list(splitter.feed(b"\0\0\0\1a\0\0\0\2b")), splitter.is_amid
        ([b'a'], True)
    """

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def is_amid(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk and yield the bodies that are complete.

        Raises:
            FrameTooLargeError: A body is longer than the limit; the bodies before it were yielded.
        """
        buffer = self._buffer
        buffer += chunk
        start = 0
        try:
            while len(buffer) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(buffer, start)
                if size > self._limit:
                    raise FrameTooLargeError(f"a frame of {size} bytes is too large")
                begin = start + LENGTH.size
                if len(buffer) < begin + size:
                    return
                start = begin + size
                yield bytes(buffer[begin:start])
        finally:
            del buffer[:start]
