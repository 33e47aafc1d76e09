"""Redriving dead letters: the selection, the pace, and the progress.

Theory of operation. A redrive reads the dead-letter topic in order. Each letter is judged once: skipped for a reason,
or sent. The cursor holds, per partition, the offset up to which letters have been processed. It is saved in steps,
together with the letters of the step or right after them; a restarted redrive continues at the last saved step.

Invariants, each a property test:
1. Without a crash each letter before the end of the cursor is processed exactly once; after a crash exactly the letters
   after the last saved step are processed again.
2. A cursor never moves back, and never past the letters that were processed.
3. In any period, counted from the start, no more is sent than the rate allows.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: The prefix of the consumer group and the transactional id of a redrive.
REDRIVE_PREFIX = "tidemill-redrive-"


class Target(enum.Enum):
    """The destination of the letters."""

    SOURCE = "source"
    SINK = "sink"
    TOPIC = "topic"


class UnsentReason(enum.Enum):
    """Why a letter is not sent."""

    NOT_SELECTED = "not selected"
    NO_LETTER = "no letter"
    TWICE = "written twice"
    MAX_REDRIVES = "max_redrives"
    NO_MESSAGES = "no source messages"
    NO_PAYLOADS = "no payloads of a sink"
    NOT_CONFIGURED = "sink not configured"
    LOST = "content lost"
    HEADERS = "headers that cannot be read"
    REFUSED = "refused"

    @property
    def failed(self) -> bool:
        """Whether the letter was selected but not sent, so that the user has to act."""
        return self not in (UnsentReason.NOT_SELECTED, UnsentReason.NO_LETTER, UnsentReason.TWICE)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts by which a letter is judged.

    Attributes:
        letter_id: The letter's id.
        kind: The kind of failure.
        sink_type: The type of the sink that refused it; '' if none did.
        sink_name: The name of that sink.
        written_at: When it was written, in seconds since the epoch.
        keys: The keys of its messages.
        redrives: How many times it was redriven before.
        messages: The number of its source messages.
        payloads: The number of its payloads.
        text: All text that a search covers; set only if `LetterCriteria.text` is.
    """

    letter_id: str
    kind: str
    sink_type: str = ""
    sink_name: str = ""
    written_at: float = 0.0
    keys: tuple[str, ...] = ()
    redrives: int = 0
    messages: int = 1
    payloads: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class LetterCriteria:
    """Selects letters: those that match at least one value of every criterion that is set.

    Attributes:
        ids: Prefixes of letter ids.
        kinds: Kinds of failure.
        sinks: `name`, `type.name` or `sinks.type.name`.
        since: Written at or after this time, in seconds since the epoch.
        until: Written before this time, in seconds since the epoch.
        keys: Keys of source messages.
        text: Text that occurs anywhere in the letter, in upper or lower case.

    Example:
        >>> LetterCriteria(kinds=("task",)).matches(Facts("1", "task"))
        True
    """

    ids: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    keys: tuple[str, ...] = ()
    text: str = ""

    def matches(self, facts: Facts) -> bool:
        """Return whether a letter is selected."""
        return (
            (not self.ids or facts.letter_id.startswith(self.ids))
            and (not self.kinds or facts.kind in self.kinds)
            and (not self.sinks or self._names_sink(facts))
            and (self.since is None or facts.written_at >= self.since)
            and (self.until is None or facts.written_at < self.until)
            and (not self.keys or not set(self.keys).isdisjoint(facts.keys))
            and self.text.casefold() in facts.text.casefold()
        )

    def _names_sink(self, facts: Facts) -> bool:
        label = f"{facts.sink_type}.{facts.sink_name}"
        return bool(facts.sink_name) and not {facts.sink_name, label, f"sinks.{label}"}.isdisjoint(self.sinks)

    @property
    def empty(self) -> bool:
        """Whether every letter matches."""
        return self == LetterCriteria()


def identify_redrive(topic: str, brokers: str, target: str, criteria: LetterCriteria) -> str:
    """Return the id of a redrive. The same selection of letters with the same target is the same redrive.

    Args:
        topic: The dead-letter topic.
        brokers: Its brokers.
        target: The target, as the user gave it.
        criteria: The selection.
    """
    lists = (criteria.ids, criteria.kinds, criteria.sinks, criteria.keys)
    sets = [sorted(set(words)) for words in lists]
    words = json.dumps([topic, brokers, target, sets, criteria.since, criteria.until, criteria.text])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def judge_letter(facts: Facts, criteria: LetterCriteria, target: Target, max_redrives: int) -> UnsentReason | None:
    """Return why a letter is not sent, or None if it is.

    Example:
        >>> judge_letter(Facts("1", "task", redrives=3), LetterCriteria(), Target.SOURCE, max_redrives=3)
        <UnsentReason.MAX_REDRIVES: 'max_redrives'>
    """
    if not criteria.matches(facts):
        return UnsentReason.NOT_SELECTED
    if target is Target.SINK:
        return None if facts.payloads and facts.sink_name else UnsentReason.NO_PAYLOADS
    if not facts.messages:
        return UnsentReason.NO_MESSAGES
    # A payload sent to a sink ends there; a message sent to a topic may return as a letter, again and again.
    return UnsentReason.MAX_REDRIVES if facts.redrives >= max_redrives else None


class SinkNames:
    """Finds the names in `LetterCriteria.sinks` that match no sink, which are probably misspelt.

    Args:
        wanted: The names, as in `LetterCriteria.sinks`.
        configured: (type, name) of the configured sinks.
    """

    def __init__(self, wanted: Iterable[str], configured: Iterable[tuple[str, str]]) -> None:
        self.unknown = set(wanted)
        for kind, name in configured:
            self.note_sink(kind, name)

    def note_sink(self, kind: str, name: str) -> None:
        """Record a sink that is configured or named in a letter."""
        if self.unknown:
            label = f"{kind}.{name}"
            self.unknown -= {name, label, f"sinks.{label}"}


class RedrivePosition:
    """The progress of a redrive in the partitions of a topic.

    Args:
        starts: The first offset of each partition that is not processed.
        ends: The offset after the last one to process; later letters are left to another redrive.
    """

    def __init__(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        self._ends = dict(ends)
        self._positions = {number: min(starts.get(number, 0), end) for number, end in ends.items()}
        self._saved = dict(self._positions)

    def advance(self, partition: int, position: int) -> None:
        """Mark all offsets before `position` as processed."""
        if partition in self._ends:
            self._positions[partition] = max(self._positions[partition], min(position, self._ends[partition]))

    @property
    def unsaved(self) -> dict[int, int]:
        """The positions that differ from the saved ones."""
        return {number: at for number, at in self._positions.items() if at != self._saved[number]}

    def note_saved(self, positions: Mapping[int, int]) -> None:
        """Record the positions that were saved."""
        for number, at in positions.items():
            self._saved[number] = max(self._saved[number], at)

    def find_saved(self, partition: int) -> int:
        """Return the last saved position."""
        return self._saved[partition]

    @property
    def left(self) -> int:
        """The number of offsets that are not processed."""
        return sum(end - self._positions[number] for number, end in self._ends.items())


class RedrivePace:
    """The pace at which messages are sent.

    Args:
        per_second: The number of messages per second; None: no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._seconds = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    def find_wait(self, now: float) -> float:
        """Return the seconds to wait before the next message may be sent."""
        return max(0.0, self._next - now)

    def note_sent(self, count: int, now: float) -> None:
        """Count messages that were sent; unused time is not made up for."""
        self._next = max(self._next, now) + count * self._seconds


@dataclass(slots=True)
class Batching:
    """The limits at which a batch of letters has to be sent.

    Attributes:
        max_letters: The maximum number of letters.
        max_bytes: The maximum size.
        max_seconds: The maximum time since the first letter.
    """

    max_letters: int
    max_bytes: int
    max_seconds: float
    letters: int = 0
    size_bytes: int = 0
    began: float | None = None

    def add(self, size_bytes: int, now: float) -> None:
        self.letters += 1
        self.size_bytes += size_bytes
        self.began = now if self.began is None else self.began

    def is_due(self, now: float) -> bool:
        return (
            self.letters >= self.max_letters
            or self.size_bytes >= self.max_bytes
            or (self.began is not None and now - self.began >= self.max_seconds)
        )

    def clear(self) -> None:
        """Start a new batch."""
        self.letters = self.size_bytes = 0
        self.began = None


class Recent:
    """The letters seen recently: an engine whose broker answered late may have written a letter twice.

    Args:
        size: The number of letters to remember; a second copy follows within seconds, so a bound loses nothing.
    """

    def __init__(self, size: int = 20_000) -> None:
        self._size = size
        self._ids: set[str] = set()
        self._order: deque[str] = deque()

    def check_seen(self, letter_id: str) -> bool:
        """Return whether a letter was seen before, and remember it."""
        if letter_id in self._ids:
            return True
        self._ids.add(letter_id)
        self._order.append(letter_id)
        if len(self._order) > self._size:
            self._ids.discard(self._order.popleft())
        return False


@dataclass(slots=True)
class RedriveTally:
    """The counts of a redrive.

    Attributes:
        sent: Letters that were sent.
        messages: Messages or payloads that were sent.
        why: The number of letters that were not sent, by reason.
        failed: (letter id, reason, text) of the first letters that were selected but not sent.
        lost_messages: Messages that were not sent because their letters had no room for their offsets.
        in_part: (letter id, lost messages) of the first letters sent without some of their messages.
        keep: The maximum number of entries in `failed` and `in_part`.
    """

    sent: int = 0
    messages: int = 0
    why: dict[UnsentReason, int] = field(default_factory=dict)
    failed: list[tuple[str, UnsentReason, str]] = field(default_factory=list)
    lost_messages: int = 0
    in_part: list[tuple[str, int]] = field(default_factory=list)
    keep: int = 1_000

    def note_skipped(self, why: UnsentReason, letter_id: str = "", text: str = "") -> None:
        """Count a letter that is not sent."""
        self.why[why] = self.why.get(why, 0) + 1
        if why.failed and len(self.failed) < self.keep:
            self.failed.append((letter_id, why, text))

    def note_sent_in_part(self, letter_id: str, lost: int) -> None:
        """Count a letter that was sent without the messages whose offsets it had no room for."""
        self.lost_messages += lost
        if len(self.in_part) < self.keep:
            self.in_part.append((letter_id, lost))

    @property
    def unsent(self) -> int:
        """The number of letters that were selected but not sent."""
        return sum(count for why, count in self.why.items() if why.failed)
