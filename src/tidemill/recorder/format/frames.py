"""The file of an open segment: one frame per batch in order of arrival, so that the file is readable while it grows.

A file begins with `MAGIC`. A frame consists of a header, the values common to the whole batch, and the batch itself. A
frame that a killed process left unfinished is ignored, as is everything after a damaged frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec

from tidemill.recorder.format.file_view import ByteView
from tidemill.recorder.format.schema import RowTable

MAGIC = b"TIDEREC1"
_HEADER = struct.Struct("<4sIII")
_MARK = b"FRAM"
#: A frame with a greater length is damaged, not unfinished.
_MAX_FRAME_BYTES = 64 * 1024 * 1024


class FrameInfo(msgspec.Struct, frozen=True, array_like=True):
    """The origin and table of a batch of rows."""

    engine_id: str
    engine: int
    seq: int
    table: RowTable


class Frame(msgspec.Struct, frozen=True):
    """A stored batch of rows; `end` is the position of the next frame."""

    info: FrameInfo
    body: bytes | memoryview
    end: int


def pack_frame(info: FrameInfo, body: bytes) -> bytes:
    about = msgspec.msgpack.encode(info)
    return _HEADER.pack(_MARK, len(about), len(body), zlib.crc32(body, zlib.crc32(about))) + about + body


class DamagedSegmentError(Exception):
    """A file of a recording is damaged; nothing after the damage can be read."""


def read_frames(data: ByteView, start: int = len(MAGIC)) -> Iterator[Frame]:
    """Yield the complete frames from a position on, up to an unfinished one.

    Raises:
        DamagedSegmentError: The data at the position is not a frame.
    """
    if len(data) < len(MAGIC):
        return  # the file was created a moment ago
    if data[: len(MAGIC)] != MAGIC:
        raise DamagedSegmentError("the file is not a segment")
    at = start
    while at + _HEADER.size <= len(data):
        mark, about_length, body_length, checksum = _HEADER.unpack(data[at : at + _HEADER.size])
        if mark != _MARK:
            raise DamagedSegmentError(f"no frame at byte {at}")
        middle = at + _HEADER.size + about_length
        end = middle + body_length
        if end - at > _MAX_FRAME_BYTES:
            raise DamagedSegmentError(f"the frame at byte {at} has an impossible length: {end - at} bytes")
        if end > len(data):
            return
        about, body = data[at + _HEADER.size : middle], data[middle:end]
        if zlib.crc32(body, zlib.crc32(about)) != checksum:
            raise DamagedSegmentError(f"wrong checksum at byte {at}")
        try:
            info = msgspec.msgpack.decode(about, type=FrameInfo)
        except msgspec.MsgspecError as error:
            raise DamagedSegmentError(f"unknown frame at byte {at}: {error}") from error
        yield Frame(info, body, end)
        at = end
