"""Which dead letters to look at and to send again, how fast, and how far a redrive has come.

Theory of operation. A redrive goes through the dead-letter topic in order. Each letter is judged once: passed over for
a reason, or sent. The cursor says, per partition, up to where letters were dealt with; it is saved in steps, together
with what was sent (or right after it), and a redrive that starts again goes on at what was saved last.

Invariants, property tests:
1. Between two ends of a cursor each letter is dealt with exactly once as far as saved steps go; after a crash exactly
   those letters come again that were dealt with after the last saved step.
2. A cursor never moves back, and never past what was dealt with.
3. No more than the rate allows is sent within any time, counted from the start.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: The consumer group and the transactional id of a redrive begin with this.
REDRIVE_PREFIX = "tidemill-redrive-"


class Target(enum.Enum):
    """Where letters go."""

    SOURCE = "source"
    SINK = "sink"
    TOPIC = "topic"


class Why(enum.Enum):
    """Why a letter is not sent."""

    NOT_SELECTED = "not selected"
    NO_LETTER = "no letter"
    TWICE = "written twice"
    MAX_REDRIVES = "max_redrives"
    NO_MESSAGES = "no source messages"
    NO_PAYLOADS = "no payloads of a sink"
    NOT_CONFIGURED = "sink not configured"
    LOST = "content lost"
    REFUSED = "refused"

    @property
    def failed(self) -> bool:
        """Whether the letter was asked for, and something has to be done about it."""
        return self not in (Why.NOT_SELECTED, Why.NO_LETTER, Why.TWICE)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a letter is judged by.

    Attributes:
        letter_id: Its id.
        kind: What went wrong.
        sink_type: The type of the sink that refused, '' where none did.
        sink_name: Its name.
        written_at: Seconds since the epoch.
        keys: Of its messages.
        redrives: How often the message was sent again before.
        messages: How many source messages it has.
        payloads: How many payloads it has.
        text: Everything that is searched for a text; filled only where one is asked for.
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
class Criteria:
    """Which letters are asked for: those that match one of each kind of criterion that is given.

    Attributes:
        ids: Beginnings of letter ids.
        kinds: What went wrong.
        sinks: `name`, `type.name` or `sinks.type.name`.
        since: Not older than this, in seconds since the epoch.
        until: Older than this, in seconds since the epoch.
        keys: Keys of source messages.
        text: Anywhere in it, in any case of letters.

    Example:
        >>> Criteria(kinds=("task",)).matches(Facts("1", "task"))
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
        """Tell whether a letter is asked for."""
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
        return self == Criteria()


def identify_redrive(topic: str, brokers: str, target: str, criteria: Criteria) -> str:
    """Return what tells a redrive from others: the same letters to the same place are the same redrive.

    Args:
        topic: The dead-letter topic.
        brokers: Its brokers.
        target: Where to, as it was given.
        criteria: Which letters.
    """
    lists = (criteria.ids, criteria.kinds, criteria.sinks, criteria.keys)
    sets = [sorted(set(words)) for words in lists]
    words = json.dumps([topic, brokers, target, sets, criteria.since, criteria.until, criteria.text])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def judge_letter(facts: Facts, criteria: Criteria, target: Target, max_redrives: int) -> Why | None:
    """Return why a letter is not sent, None if it is.

    Example:
        >>> judge_letter(Facts("1", "task", redrives=3), Criteria(), Target.SOURCE, max_redrives=3)
        <Why.MAX_REDRIVES: 'max_redrives'>
    """
    if not criteria.matches(facts):
        return Why.NOT_SELECTED
    if target is Target.SINK:
        return None if facts.payloads and facts.sink_name else Why.NO_PAYLOADS
    if not facts.messages:
        return Why.NO_MESSAGES
    # What goes to a sink ends there; what goes to a topic may come back as a letter, again and again.
    return Why.MAX_REDRIVES if facts.redrives >= max_redrives else None


class SinkNames:
    """The names by which sinks were asked for and that nothing has: most likely they are misspelt.

    Args:
        asked: As in `Criteria.sinks`.
        configured: (type, name) of the sinks there are.
    """

    def __init__(self, asked: Iterable[str], configured: Iterable[tuple[str, str]]) -> None:
        """Start with what is configured."""
        self.unknown = set(asked)
        for kind, name in configured:
            self.met(kind, name)

    def met(self, kind: str, name: str) -> None:
        """Note a sink that a letter names."""
        if self.unknown:
            label = f"{kind}.{name}"
            self.unknown -= {name, label, f"sinks.{label}"}


class Cursor:
    """How far a redrive has come in the partitions of a topic.

    Args:
        starts: The first offset of each partition that is not dealt with.
        ends: The offset after the last one to deal with; what is written later is another run's.
    """

    def __init__(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Start with nothing dealt with."""
        self._ends = dict(ends)
        self._positions = {number: min(starts.get(number, 0), end) for number, end in ends.items()}
        self._saved = dict(self._positions)

    def passed(self, partition: int, position: int) -> None:
        """Note that everything before `position` is done."""
        if partition in self._ends:
            self._positions[partition] = max(self._positions[partition], min(position, self._ends[partition]))

    @property
    def unsaved(self) -> dict[int, int]:
        """The positions that differ from what was saved."""
        return {number: at for number, at in self._positions.items() if at != self._saved[number]}

    def saved(self, positions: Mapping[int, int]) -> None:
        """Note what was saved."""
        for number, at in positions.items():
            self._saved[number] = max(self._saved[number], at)

    def saved_at(self, partition: int) -> int:
        """Return the position that was saved last."""
        return self._saved[partition]

    @property
    def left(self) -> int:
        """How many offsets are not dealt with."""
        return sum(end - self._positions[number] for number, end in self._ends.items())


class Pace:
    """When the next message may be sent.

    Args:
        per_second: How many messages in a second; None: any number.
    """

    def __init__(self, per_second: float | None) -> None:
        """Start without any message sent."""
        self._seconds = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Return for how many seconds nothing may be sent yet."""
        return max(0.0, self._next - now)

    def sent(self, count: int, now: float) -> None:
        """Book messages; time that passed unused is not made up for."""
        self._next = max(self._next, now) + count * self._seconds


@dataclass(slots=True)
class Batching:
    """When what was gathered has to be sent.

    Attributes:
        max_letters: After this many letters.
        max_bytes: Or this many bytes.
        max_seconds: Or this long after the first.
    """

    max_letters: int
    max_bytes: int
    max_seconds: float
    letters: int = 0
    size_bytes: int = 0
    began: float | None = None

    def add(self, size_bytes: int, now: float) -> None:
        """Count a letter."""
        self.letters += 1
        self.size_bytes += size_bytes
        self.began = now if self.began is None else self.began

    def due(self, now: float) -> bool:
        """Tell whether it is time."""
        return (
            self.letters >= self.max_letters
            or self.size_bytes >= self.max_bytes
            or (self.began is not None and now - self.began >= self.max_seconds)
        )

    def clear(self) -> None:
        """Begin again."""
        self.letters = self.size_bytes = 0
        self.began = None


class Recent:
    """The letters seen lately: an engine whose broker answered late may have written one twice.

    Args:
        size: How many to remember; the second copy comes within seconds, so this bounds memory at no cost.
    """

    def __init__(self, size: int = 20_000) -> None:
        """Start empty."""
        self._size = size
        self._ids: set[str] = set()
        self._order: deque[str] = deque()

    def seen(self, letter_id: str) -> bool:
        """Tell whether a letter was seen before, and remember it."""
        if letter_id in self._ids:
            return True
        self._ids.add(letter_id)
        self._order.append(letter_id)
        if len(self._order) > self._size:
            self._ids.discard(self._order.popleft())
        return False


@dataclass(slots=True)
class Tally:
    """What happened in a redrive.

    Attributes:
        sent: Letters that were sent.
        messages: Messages or payloads that were sent.
        why: How many letters were not sent, by reason.
        failed: (letter id, reason, text) of letters that were asked for and not sent; the first ones.
        lost_messages: Messages of letters that were sent, which those letters had no room to name.
        in_part: (letter id, messages lost) of such letters; the first ones.
    """

    sent: int = 0
    messages: int = 0
    why: dict[Why, int] = field(default_factory=dict)
    failed: list[tuple[str, Why, str]] = field(default_factory=list)
    lost_messages: int = 0
    in_part: list[tuple[str, int]] = field(default_factory=list)
    keep: int = 1_000

    def passed_over(self, why: Why, letter_id: str = "", text: str = "") -> None:
        """Count a letter that is not sent."""
        self.why[why] = self.why.get(why, 0) + 1
        if why.failed and len(self.failed) < self.keep:
            self.failed.append((letter_id, why, text))

    def sent_in_part(self, letter_id: str, lost: int) -> None:
        """Count a letter that was sent without the messages whose positions it had no room for."""
        self.lost_messages += lost
        if len(self.in_part) < self.keep:
            self.in_part.append((letter_id, lost))

    @property
    def unsent(self) -> int:
        """How many letters were asked for and not sent."""
        return sum(count for why, count in self.why.items() if why.failed)
