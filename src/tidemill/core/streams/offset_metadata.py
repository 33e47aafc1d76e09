"""What is known above a commit floor, as a short text that is kept beside the committed offset.

A broker keeps one number per partition and a little text with it. The text says which offsets above the floor are
clean and how often others failed, so that the next reader of the partition gives nothing clean again and goes on
counting. Invariants: a note never exceeds its limit: what does not fit is left out from the end, which costs a
repetition and loses nothing; what it holds can be read back: numbers that no log has are left out; a text that is not
a note is not an error, and says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from tidemill.core.streams.redelivery_items import Commit

LaneT = TypeVar("LaneT")

#: Brokers take 4096 bytes (`offset.metadata.max.bytes`).
MAX_NOTE_BYTES = 4000
#: Failures are few, and each matters more than an interval does.
_FAILURES_BYTES = MAX_NOTE_BYTES // 2
#: Logs count in 64 bits, with a sign.
_MAX_NUMBER = (1 << 63) - 1
_MARK = "tidemill1"
_PAIRS = r"(?:[0-9]{1,19}\+[0-9]{1,19}(?:,[0-9]{1,19}\+[0-9]{1,19})*)?"
_NOTE = re.compile(rf"{_MARK};([0-9]{{1,19}});({_PAIRS});({_PAIRS})", re.ASCII)


def encode_note(commit: Commit[LaneT]) -> str:
    """Return the note of a commit, '' where there is nothing to say.

    Example:
        >>> encode_note(Commit("a", 100, ((102, 110), (112, 113)), ((100, 2),)))
        'tidemill1;100;0+2;2+8,12+1'
    """
    if not 0 <= commit.floor <= _MAX_NUMBER:
        return ""
    head = f"{_MARK};{commit.floor};"
    failures = _joined(((at - commit.floor, count) for at, count in commit.failures), _FAILURES_BYTES)
    room = MAX_NOTE_BYTES - len(head) - len(failures) - 1
    clean = _joined(((start - commit.floor, end - start) for start, end in commit.clean), room)
    return f"{head}{failures};{clean}" if failures or clean else ""


def _joined(pairs: Iterable[tuple[int, int]], room: int) -> str:
    words: list[str] = []
    for first, second in pairs:
        if not (0 <= first <= _MAX_NUMBER and 0 < second <= _MAX_NUMBER):
            continue
        word = f"{first}+{second}"
        room -= len(word) + 1
        if room < 0:
            break
        words.append(word)
    return ",".join(words)


def decode_note(lane: LaneT, text: str | None) -> Commit[LaneT] | None:
    """Return what a note says about its lane, None where the text is not a note.

    Example:
        >>> decode_note("a", "tidemill1;100;0+2;2+8,12+1")
        Commit(lane='a', floor=100, clean=((102, 110), (112, 113)), failures=((100, 2),))
    """
    found = _NOTE.fullmatch(text or "")
    if found is None:
        return None
    floor = int(found[1])
    failures = tuple((floor + at, count) for at, count in _pairs(found[2]))
    clean = tuple((floor + at, floor + at + length) for at, length in _pairs(found[3]))
    return Commit(lane, floor, clean, failures)


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in (word.split("+") for word in text.split(",") if word)]
