"""Offset ranges: where they begin and end, how they are split, and what is left of them after a run that was stopped.

Pure decisions of a bounded run. Invariants: pieces cover exactly what was asked for, in order and without overlap; what
is finished is never given again; no chunk holds two ranges of one partition.
"""

from __future__ import annotations

import datetime
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.errors import ConfigError
from tidemill.core.intervals import Intervals

#: With so many pieces per core, the last ones to run keep no core idle for long.
PIECES_PER_CORE = 4
#: A piece costs the start of an engine (about half a second), so none is made smaller than this without being asked.
MIN_PIECE_MESSAGES = 1_000
MAX_PIECE_MESSAGES = 50_000

_OFFSET = re.compile(r"[0-9]{1,19}", re.ASCII)


class Edge(enum.Enum):
    """The two ends of a partition."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Offset:
    """The same offset in every partition."""

    value: int


@dataclass(frozen=True, slots=True)
class Moment:
    """In every partition the first message that is not older; milliseconds since the epoch."""

    milliseconds: int


Position = Edge | Offset | Moment


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets of one partition from `start` up to, but without, `end`."""

    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets it has; a topic that is compacted or transactional has fewer messages."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Span:
    """What one partition has of what was asked for.

    Attributes:
        range: What there is; empty if nothing.
        deleted: How many offsets were asked for that the broker has deleted.
        beyond: How many were asked for that do not exist yet.
    """

    range: OffsetRange
    deleted: int
    beyond: int


Chunk = tuple[OffsetRange, ...]


def parse_position(text: str, name: str) -> Position:
    """Read where a range begins or ends.

    Args:
        text: `earliest`, `latest`, an offset, or a time as ISO 8601 with its zone.
        name: What it is called where the user wrote it, for the error.

    Raises:
        ConfigError: It is none of these.

    Example:
        >>> parse_position("42", "--from")
        Offset(value=42)
        >>> parse_position("1970-01-01T00:00:01Z", "--from")
        Moment(milliseconds=1000)
    """
    text = text.strip()
    if text.lower() in (edge.value for edge in Edge):
        return Edge(text.lower())
    if _OFFSET.fullmatch(text):
        return Offset(int(text))
    wanted = (
        "give an offset (1200), a time with its zone (2026-05-01T00:00:00Z or 2026-05-01T00:00:00+02:00), earliest or "
        "latest"
    )
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is neither an offset nor a time; {wanted}") from None
    if moment.tzinfo is None:
        raise ConfigError(f"{name} {text!r} has no time zone, so it is ambiguous; {wanted}")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    if since < datetime.timedelta(0):
        raise ConfigError(f"{name} {text!r} is before 1970; {wanted}")
    return Moment(since // datetime.timedelta(milliseconds=1))


def check_order(start: Position, end: Position, names: tuple[str, str] = ("--from", "--to")) -> None:
    """Refuse two positions between which nothing can be.

    Args:
        start: Where it begins.
        end: Where it ends.
        names: What both are called where the user wrote them.

    Raises:
        ConfigError: The end is not behind the start.
    """
    match start, end:
        case Offset(first), Offset(last) if first >= last:
            pass
        case Moment(first), Moment(last) if first >= last:
            pass
        case (Edge.LATEST, _) | (_, Edge.EARLIEST):
            pass
        case _:
            return
    raise ConfigError(f"{names[1]} is not after {names[0]}, so there is nothing between them; swap or change them")


def span_of(partition: int, start: int, end: int, low: int, high: int) -> Span:
    """Return what a partition has of [start, end).

    Args:
        partition: Its number.
        start: Where to begin.
        end: Where to end.
        low: The oldest offset that it still has.
        high: Its end.

    Example:
        >>> span_of(0, 10, 100, 30, 80)
        Span(range=OffsetRange(partition=0, start=30, end=80), deleted=20, beyond=20)
    """
    end = max(start, end)
    deleted = max(0, min(low, end) - start)
    beyond = max(0, end - max(high, start))
    first = min(max(start, low), high)
    return Span(OffsetRange(partition, first, max(first, min(end, high))), deleted, beyond)


def piece_size(total: int, cores: int) -> int:
    """Return how many offsets a piece has if nobody said.

    Example:
        >>> piece_size(100_000, 2), piece_size(10_000_000, 2), piece_size(10, 2)
        (12500, 50000, 1000)
    """
    wanted = -(-total // (max(1, cores) * PIECES_PER_CORE))
    return min(MAX_PIECE_MESSAGES, max(MIN_PIECE_MESSAGES, wanted))


def split(ranges: Iterable[OffsetRange], size: int) -> list[OffsetRange]:
    """Cut ranges into pieces of nearly the same size, none above `size`; the order is that of work.

    The first pieces of all partitions come first, so that old messages are done before young ones.

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


def remaining(planned: Iterable[OffsetRange], finished: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return the parts of planned ranges that are not finished, in the order of the plan.

    Example:
        >>> remaining([OffsetRange(0, 0, 10)], [OffsetRange(0, 0, 4)])
        [OffsetRange(partition=0, start=4, end=10)]
    """
    done: dict[int, Intervals] = {}
    for part in finished:
        done.setdefault(part.partition, Intervals()).add(part.start, part.end)
    pairs: Mapping[int, tuple[tuple[int, int], ...]] = {number: found.pairs() for number, found in done.items()}
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


def chunks(pieces: Sequence[OffsetRange], size: int) -> list[Chunk]:
    """Put small pieces of different partitions together, up to about `size` offsets, so that an engine is worth it.

    Example:
        >>> chunks([OffsetRange(0, 0, 2), OffsetRange(1, 0, 2), OffsetRange(2, 0, 2)], 4)[0]
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
