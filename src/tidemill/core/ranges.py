"""Offset ranges: parsing, splitting, and the part that remains after a run was stopped.

Pure decisions of a bounded run. Invariants: pieces cover exactly the requested range, in order and without overlap;
finished offsets are never returned again; no chunk holds two ranges of one partition.
"""

from __future__ import annotations

import datetime
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.errors import ConfigError
from tidemill.core.intervals import Intervals

#: With this many pieces per core, no core is idle for long while the last ones run.
PIECES_PER_CORE = 4
#: A piece costs the start of an engine (about half a second), so smaller ones are created only on request.
MIN_PIECE_MESSAGES = 1_000
MAX_PIECE_MESSAGES = 50_000

_OFFSET = re.compile(r"[0-9]{1,19}", re.ASCII)


class PartitionEdge(enum.Enum):
    """The two ends of a partition."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Offset:
    """The same offset in every partition."""

    value: int


@dataclass(frozen=True, slots=True)
class TimeBound:
    """The first message at or after a time, in every partition; the time is in milliseconds since the epoch."""

    milliseconds: int


Position = PartitionEdge | Offset | TimeBound


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets of one partition from `start` up to, but not including, `end`."""

    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of offsets; a topic that is compacted or transactional has fewer messages."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PartitionSpan:
    """The part of a requested range that exists in a partition.

    Attributes:
        range: The offsets that exist; may be empty.
        deleted: The number of requested offsets that the broker has deleted.
        beyond: The number of requested offsets that do not exist yet.
    """

    range: OffsetRange
    deleted: int
    beyond: int


Chunk = tuple[OffsetRange, ...]


def parse_position(text: str, name: str) -> Position:
    """Parse the start or end of a range.

    Args:
        text: `earliest`, `latest`, an offset, or an ISO 8601 time with a time zone.
        name: The option or setting it comes from, for the error message.

    Raises:
        ConfigError: The text is none of these.

    Example:
        >>> parse_position("42", "--from")
        Offset(value=42)
        >>> parse_position("1970-01-01T00:00:01Z", "--from")
        TimeBound(milliseconds=1000)
    """
    text = text.strip()
    if text.lower() in (edge.value for edge in PartitionEdge):
        return PartitionEdge(text.lower())
    if _OFFSET.fullmatch(text):
        return Offset(int(text))
    wanted = (
        "give an offset (1200), a time with a time zone (2026-05-01T00:00:00Z or 2026-05-01T00:00:00+02:00), earliest "
        "or latest"
    )
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is neither an offset nor a time; {wanted}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{name} {text!r} has no time zone; {wanted}")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    if since < datetime.timedelta(0):
        raise ConfigError(f"{name} {text!r} is before 1970; {wanted}")
    return TimeBound(since // datetime.timedelta(milliseconds=1))


def check_order(start: Position, end: Position, names: tuple[str, str] = ("--from", "--to")) -> None:
    """Reject a range that is always empty.

    Args:
        start: The start of the range.
        end: The end of the range.
        names: The options or settings that they come from, for the error message.

    Raises:
        ConfigError: The end is not after the start.
    """
    match start, end:
        case Offset(first), Offset(last) if first >= last:
            pass
        case TimeBound(first), TimeBound(last) if first >= last:
            pass
        case (PartitionEdge.LATEST, _) | (_, PartitionEdge.EARLIEST):
            pass
        case _:
            return
    raise ConfigError(f"{names[1]} is not after {names[0]}, so the range is empty; swap or change them")


def find_span(partition: int, start: int, end: int, low: int, high: int) -> PartitionSpan:
    """Return the part of [start, end) that exists in a partition.

    Args:
        partition: The number of the partition.
        start: The first offset requested.
        end: The offset after the last one requested.
        low: The oldest offset that the partition still has.
        high: The offset after its last one.

    Example:
        >>> find_span(0, 10, 100, 30, 80)
        PartitionSpan(range=OffsetRange(partition=0, start=30, end=80), deleted=20, beyond=20)
    """
    end = max(start, end)
    deleted = max(0, min(low, end) - start)
    beyond = max(0, end - max(high, start))
    first = min(max(start, low), high)
    return PartitionSpan(OffsetRange(partition, first, max(first, min(end, high))), deleted, beyond)


def choose_piece_size(total: int, cores: int) -> int:
    """Return the default number of offsets in a piece.

    Example:
        >>> choose_piece_size(100_000, 2), choose_piece_size(10_000_000, 2), choose_piece_size(10, 2)
        (12500, 50000, 1000)
    """
    wanted = -(-total // (max(1, cores) * PIECES_PER_CORE))
    return min(MAX_PIECE_MESSAGES, max(MIN_PIECE_MESSAGES, wanted))


def split(ranges: Iterable[OffsetRange], size: int) -> list[OffsetRange]:
    """Cut ranges into pieces of nearly equal size, none above `size`, in the order in which they are to be run.

    The first pieces of all partitions come first, so that older messages are processed before newer ones.

    Example:
        >>> [(piece.start, piece.end) for piece in split([OffsetRange(0, 0, 10)], 4)]
        [(0, 4), (4, 7), (7, 10)]
    """
    pieces: list[tuple[int, OffsetRange]] = []
    for whole in ranges:
        count = -(-whole.size // size)
        small, larger = divmod(whole.size, count) if count else (0, 0)
        start = whole.start
        for index in range(count):
            end = start + small + (index < larger)
            pieces.append((index, OffsetRange(whole.partition, start, end)))
            start = end
    return [piece for _, piece in sorted(pieces)]


def find_remaining(planned: Iterable[OffsetRange], finished: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return the parts of planned ranges that are not finished, in the order of the plan.

    Example:
        >>> find_remaining([OffsetRange(0, 0, 10)], [OffsetRange(0, 0, 4)])
        [OffsetRange(partition=0, start=4, end=10)]
    """
    done: dict[int, Intervals] = {}
    for part in finished:
        done.setdefault(part.partition, Intervals()).add(part.start, part.end)
    pairs: Mapping[int, tuple[tuple[int, int], ...]] = {number: found.list_pairs() for number, found in done.items()}
    left = []
    for piece in planned:
        start = piece.start
        for first, last in pairs.get(piece.partition, ()):
            if last <= start or first >= piece.end:
                continue
            if first > start:
                left.append(OffsetRange(piece.partition, start, first))
            start = last
        if start < piece.end:
            left.append(OffsetRange(piece.partition, start, piece.end))
    return left


def group_pieces(pieces: Sequence[OffsetRange], size: int) -> list[Chunk]:
    """Combine small pieces of different partitions, up to about `size` offsets, so that each is worth an engine.

    Example:
        >>> group_pieces([OffsetRange(0, 0, 2), OffsetRange(1, 0, 2), OffsetRange(2, 0, 2)], 4)[0]
        (OffsetRange(partition=0, start=0, end=2), OffsetRange(partition=1, start=0, end=2))
    """
    found: list[Chunk] = []
    open_pieces: list[OffsetRange] = []
    partitions: set[int] = set()
    total = 0
    for piece in pieces:
        if open_pieces and (total + piece.size > size or piece.partition in partitions):
            found.append(tuple(open_pieces))
            open_pieces, partitions, total = [], set(), 0
        open_pieces.append(piece)
        partitions.add(piece.partition)
        total += piece.size
    if open_pieces:
        found.append(tuple(open_pieces))
    return found
