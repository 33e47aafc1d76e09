"""The state above a commit floor, as metadata that is committed with the offset.

A broker stores one offset per partition and a short text with it. The text lists the clean offsets above the floor and
the failure counts of others, so that the next reader of the partition redelivers nothing clean and continues counting.

Invariants: the text never exceeds its limit. Entries that do not fit are left out from the end, which costs a
redelivery but loses nothing. Every text that is written can be decoded: offsets that a log cannot have are left out. A
text in another format is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from tidemill.core.streams.redelivery_items import Commit

LaneT = TypeVar("LaneT")

#: Brokers accept 4096 bytes (`offset.metadata.max.bytes`).
MAX_METADATA_BYTES = 4000
#: Failures come first: they are few, and each matters more than an interval.
_FAILURES_BYTES = MAX_METADATA_BYTES // 2
#: Offsets are signed 64-bit numbers.
_MAX_NUMBER = (1 << 63) - 1
_PREFIX = "tidemill1"
_PAIRS = r"(?:[0-9]{1,19}\+[0-9]{1,19}(?:,[0-9]{1,19}\+[0-9]{1,19})*)?"
_FORMAT = re.compile(rf"{_PREFIX};([0-9]{{1,19}});({_PAIRS});({_PAIRS})", re.ASCII)


def encode_metadata(commit: Commit[LaneT]) -> str:
    """Return the metadata of a commit; '' if there is nothing to record.

    Example:
        >>> encode_metadata(Commit("a", 100, ((102, 110), (112, 113)), ((100, 2),)))
        'tidemill1;100;0+2;2+8,12+1'
    """
    if not 0 <= commit.floor <= _MAX_NUMBER:
        return ""
    head = f"{_PREFIX};{commit.floor};"
    failures = _join_split_pairs(((at - commit.floor, count) for at, count in commit.failures), _FAILURES_BYTES)
    room = MAX_METADATA_BYTES - len(head) - len(failures) - 1
    clean = _join_split_pairs(((start - commit.floor, end - start) for start, end in commit.clean), room)
    return f"{head}{failures};{clean}" if failures or clean else ""


def _join_split_pairs(pairs: Iterable[tuple[int, int]], room: int) -> str:
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


def decode_metadata(lane: LaneT, text: str | None) -> Commit[LaneT] | None:
    """Return the commit that the metadata of a lane describes; None if the text has another format.

    Example:
        >>> decode_metadata("a", "tidemill1;100;0+2;2+8,12+1")
        Commit(lane='a', floor=100, clean=((102, 110), (112, 113)), failures=((100, 2),))
    """
    found = _FORMAT.fullmatch(text or "")
    if found is None:
        return None
    floor = int(found[1])
    failures = tuple((floor + at, count) for at, count in _split_pairs(found[2]))
    clean = tuple((floor + at, floor + at + length) for at, length in _split_pairs(found[3]))
    return Commit(lane, floor, clean, failures)


def _split_pairs(text: str) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in (word.split("+") for word in text.split(",") if word)]
