"""The record of a redrive, saved with its cursor: which letters were sent, to which target, and when.

A redrive processes the letters of a partition in order, so each entry is a range of offsets and a time. All letters in
the range that match the criteria were sent, except those that are listed as unsent.

Invariant: a record never claims a letter that was not sent. If there is not enough room, the oldest entries are
forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.core.deadletters.redrive import Facts, LetterCriteria

#: By default, Kafka stores up to 4,096 bytes with a committed offset.
ROOM_BYTES = 4_000
#: A range that adjoins the last one, and is saved within this time of it, extends it.
SAME_RUN_SECONDS = 60.0
_VERSION = 1


@dataclass(frozen=True, slots=True)
class RedrivenRange:
    """A range of offsets that were processed together.

    Attributes:
        first: The first offset.
        end: The offset after the last one.
        at: When the last one was processed, in whole seconds since the epoch.
    """

    first: int
    end: int
    at: int


@dataclass(slots=True)
class RedriveRecord:
    """The record of one redrive in one partition.

    Attributes:
        to: The target of the letters: source, sink, or a topic.
        criteria: The selection.
        runs: The ranges that were processed, in the order of processing.
        unsent: Offsets of letters that were selected but not sent.
    """

    to: str
    criteria: LetterCriteria
    runs: list[RedrivenRange] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)

    def note_range(self, first: int, end: int, at: float, unsent: Iterable[int] = ()) -> None:
        """Record that a range is processed, and which of its selected letters were not sent."""
        if end <= first:
            return
        last = self.runs[-1] if self.runs else None
        if last is not None and last.end == first and at - last.at < SAME_RUN_SECONDS:
            self.runs[-1] = RedrivenRange(last.first, end, int(at))
        else:
            self.runs.append(RedrivenRange(first, end, int(at)))
        self.unsent = [offset for offset in self.unsent if not first <= offset < end]
        self.unsent += unsent

    def note_unsent(self, offset: int) -> None:
        """Record that a letter was not sent after all."""
        self.unsent.append(offset)

    def find_sent_at(self, offset: int, facts: Facts) -> int | None:
        """Return when a letter was last sent, in seconds since the epoch; None if this redrive did not send it.

        Args:
            offset: The letter's offset.
            facts: The facts of the letter, with its text if `criteria.text` is set.
        """
        if offset in self.unsent or not self.criteria.matches(facts):
            return None
        return next((run.at for run in reversed(self.runs) if run.first <= offset < run.end), None)

    def copy(self) -> RedriveRecord:
        return RedriveRecord(self.to, self.criteria, list(self.runs), list(self.unsent))

    def encode(self, room_bytes: int = ROOM_BYTES) -> str:
        """Return the record as text of at most `room_bytes`; '' if not even one range fits."""
        runs, unsent = list(self.runs), list(self.unsent)
        while runs:
            text = self._format(runs, unsent)
            if len(text) <= room_bytes:  # the text is ASCII, so characters are bytes
                return text
            if unsent:
                # Forgotten offsets were unsent, so no letter up to the last of them may be claimed.
                cut = sorted(unsent)[(len(unsent) - 1) // 2] + 1
                unsent = [offset for offset in unsent if offset >= cut]
                runs = [RedrivenRange(max(run.first, cut), run.end, run.at) for run in runs if run.end > cut]
            else:
                runs = runs[(len(runs) + 1) // 2 :]
        return ""

    def _format(self, runs: Iterable[RedrivenRange], unsent: Iterable[int]) -> str:
        criteria = self.criteria
        fields = {
            "ids": criteria.ids,
            "kinds": criteria.kinds,
            "sinks": criteria.sinks,
            "since": criteria.since,
            "until": criteria.until,
            "keys": criteria.keys,
            "text": criteria.text,
        }
        content = {
            "tidemill": _VERSION,
            "to": self.to,
            "asked": {name: value for name, value in fields.items() if value not in ((), None, "")},
            "runs": [(run.first, run.end, run.at) for run in runs],
            "unsent": sorted(set(unsent)),
        }
        return json.dumps(content, separators=(",", ":"))


def decode_record(text: str) -> RedriveRecord | None:
    """Return the record that `RedriveRecord.encode` wrote; None for any other text."""
    try:
        content = json.loads(text)
        if content["tidemill"] != _VERSION:
            return None
        asked = content["asked"]
        lists = {name: tuple(asked.get(name, ())) for name in ("ids", "kinds", "sinks", "keys")}
        criteria = LetterCriteria(
            since=asked.get("since"), until=asked.get("until"), text=asked.get("text", ""), **lists
        )
        runs = [RedrivenRange(int(first), int(end), int(at)) for first, end, at in content["runs"]]
        return RedriveRecord(str(content["to"]), criteria, runs, [int(offset) for offset in content["unsent"]])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # not a record
