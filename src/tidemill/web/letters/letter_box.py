"""Reads dead letters for the web UI, as `tidemill dlq` does.

Invariants: one search at a time, so that readers cannot keep the brokers busy; a search ends after less than a second
with what it has found and where to go on, so that pages show progress; of letters that are listed only a row is kept.
Blocking: not for event loops.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Criteria
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.backwards import find_newest_first, restrict
from tidemill.deadletters.opening import Letters, open_letters
from tidemill.deadletters.reader import Found, LetterReader, Reached
from tidemill.deadletters.redrive.history import RedriveHistory, Redriven, read_history
from tidemill.deadletters.search import Ranges
from tidemill.web.letters.models import LetterPage, WholeLetter, describe_letter, describe_whole
from tidemill.web.problems import Problem
from tidemill.web.workers import is_over

log = structlog.get_logger(__name__)

#: After this long a list is answered with what is certain, and how to go on.
SLICE_SECONDS = 0.6
#: How long the search for one letter may take.
SEARCH_SECONDS = 15.0
#: How long a search waits for another one.
WAIT_SECONDS = 4.0
#: How long what was sent again is remembered; and after that time it is tried again where it cannot be looked up.
HISTORY_SECONDS = 2.0
REFUSED_SECONDS = 10.0
#: More in one answer would be a long answer, and much to keep.
MAX_ROWS = 500
#: A longer one does not fit into a request: then a search cannot be continued.
MAX_CURSOR_CHARS = 16_000
#: No time is later.
_MOST_SECONDS = 1e11
AnswerT = TypeVar("AnswerT")


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a search goes on.

    Attributes:
        since: From when, in seconds since the epoch: "15m" before now is another time with each page.
        until: Until when.
        count: How many partitions or files there were.
        mark: What they were.
        rest: The ends of those that are not searched yet.
    """

    since: float | None
    until: float | None
    count: int
    mark: bytes
    rest: dict[int, int]


def open_cursor(text: str) -> Cursor | None:
    """Return what a cursor says; None without one.

    Raises:
        Problem: It is not one of ours.
    """
    if not text:
        return None
    with contextlib.suppress(ValueError):  # wrong base64, MessagePack, types
        cursor = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.encode()), type=Cursor)
        if all(at is None or 0 <= at < _MOST_SECONDS for at in (cursor.since, cursor.until)):
            return cursor
    raise Problem(422, "cursor: this is not one that this server has given out; begin again without it")


class _Bounded:
    """Letters that are read only as long as somebody waits for them."""

    def __init__(self, box: Letters) -> None:
        self._box = box

    def find_offsets_at(self, seconds: float, ranges: Ranges) -> dict[int, int]:
        return self._box.find_offsets_at(seconds, ranges)

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Found | Reached | None]:
        for each in self._box.stream(starts, ends):
            if is_over():
                raise Problem(504, "the search for letters took too long; give more filters")
            yield each


class LetterBox:
    """The dead letters of a pipeline.

    Args:
        settings: Of the pipeline.
        slice_seconds: How long the search for a list may take.
        search_seconds: How long the search for one letter may take.
        wait_seconds: How long a search waits for another one.
    """

    def __init__(
        self,
        settings: Settings,
        slice_seconds: float = SLICE_SECONDS,
        search_seconds: float = SEARCH_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Open nothing yet."""
        self._settings = settings
        self._slice_seconds = slice_seconds
        self._search_seconds = search_seconds
        self._wait_seconds = wait_seconds
        self._one_at_a_time = threading.Lock()
        self._history: RedriveHistory | None = None
        self._read_again_at = -math.inf

    def find(self, criteria: Criteria, limit: int, cursor: Cursor | None = None) -> LetterPage:
        """Return the newest letters that match, the newest first.

        Args:
            criteria: Which.
            limit: The most rows; at most `MAX_ROWS`.
            cursor: From the page before.

        Raises:
            Problem: They cannot be read.
        """
        if cursor is not None:
            criteria = replace(criteria, since=cursor.since, until=cursor.until)

        def search(box: Letters) -> LetterPage:
            sent = self._find_history(box)
            ends_at = time.monotonic() + self._slice_seconds
            ranges = box.find_ranges()
            wanted = ranges if cursor is None else restrict(ranges, _check_rest(cursor, box, ranges))
            found = find_newest_first(
                _Bounded(box),
                wanted,
                criteria,
                min(limit, MAX_ROWS),
                lambda one: describe_letter(one, sent(one)),
                lambda: time.monotonic() >= ends_at,
            )
            total = sum(end - low for low, end in ranges.values())
            left = sum(end - ranges[number][0] for number, end in found.rest.items())
            return LetterPage(
                rows=found.rows,
                cursor=_make_cursor(criteria, box, ranges, found.rest) if found.rest else None,
                others=found.others,
                is_whole=not found.rest,
                searched=total - left,
                total=total,
                place=box.place,
            )

        return self._ask(search)

    def read(self, letter_id: str, at: tuple[int, int] | None = None) -> WholeLetter:
        """Return one letter.

        Args:
            letter_id: Its id.
            at: Its partition or file and its offset or row, if they are known: then it need not be searched for.

        Raises:
            Problem: There is none with this id, or it cannot be read.
        """

        def search(box: Letters) -> WholeLetter:
            sent, allowed = self._find_history(box), self._settings.dlq.max_redrives
            ends_at = time.monotonic() + self._search_seconds
            ranges = box.find_ranges()
            for place in (_narrow(ranges, at), ranges):
                wanted = place
                while wanted:
                    found = find_newest_first(
                        _Bounded(box),
                        wanted,
                        Criteria(ids=(letter_id,)),
                        MAX_ROWS,
                        lambda one: describe_whole(one, sent(one), allowed),
                        lambda: True,
                    )
                    whole = next((row for row in found.rows if row.letter_id == letter_id), None)
                    if whole is not None:
                        return whole
                    if found.rest and time.monotonic() >= ends_at:
                        late = f"it was not found within {self._search_seconds:g} s"
                        raise Problem(504, f"letter {letter_id!r}: {late}; `tidemill dlq show` searches all")
                    wanted = restrict(wanted, found.rest)
            raise Problem(404, f"no letter {letter_id!r} in {box.place}")

        return self._ask(search)

    def _find_history(self, box: Letters) -> Callable[[Found], list[Redriven] | None]:
        """Return a function that returns when and where to a letter was sent again; None: that is not known."""
        if time.monotonic() >= self._read_again_at:
            pause = HISTORY_SECONDS
            try:
                self._history = read_history(self._settings, box)
            except RemoteError as error:
                # Listing groups takes a permission of its own; letters can be read without it.
                log.warning("the pages of dead letters cannot say which were sent again", error=str(error))
                self._history, pause = None, REFUSED_SECONDS
            self._read_again_at = time.monotonic() + pause
        history = self._history
        return (lambda found: None) if history is None else history.list_redriven

    def _ask(self, search: Callable[[Letters], AnswerT]) -> AnswerT:
        if not self._one_at_a_time.acquire(timeout=self._wait_seconds):
            raise Problem(429, "dead letters are being searched already; try again in a moment", {"Retry-After": "2"})
        try:
            with open_letters(self._settings, "tidemill-web") as box:
                return search(box)
        except ConfigError as error:  # no pipeline has written a letter yet
            raise Problem(404, str(error)) from error
        except RemoteError as error:
            raise Problem(503, str(error)) from error
        finally:
            self._one_at_a_time.release()


def _narrow(ranges: Ranges, at: tuple[int, int] | None) -> dict[int, tuple[int, int]]:
    """Return the range of one position; empty if it does not exist."""
    low, end = ranges.get(at[0], (0, 0)) if at is not None else (0, 0)
    return {at[0]: (at[1], at[1] + 1)} if at is not None and low <= at[1] < end else {}


def _mark(box: Letters, count: int) -> bytes:
    """Return what distinguishes the first partitions or files from others that have their numbers."""
    names = [box.topic] if isinstance(box, LetterReader) else [box.identify(number)[0] for number in range(count)]
    return hashlib.blake2b("/".join(names).encode(errors="replace"), digest_size=8).digest()


def _make_cursor(criteria: Criteria, box: Letters, ranges: Ranges, rest: Mapping[int, int]) -> str | None:
    cursor = Cursor(criteria.since, criteria.until, len(ranges), _mark(box, len(ranges)), dict(rest))
    text = base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).decode()
    return text if len(text) <= MAX_CURSOR_CHARS else None


def _check_rest(cursor: Cursor, box: Letters, ranges: Ranges) -> Mapping[int, int]:
    if not 0 <= cursor.count <= len(ranges) or cursor.mark != _mark(box, cursor.count):
        raise Problem(409, "cursor: the letters are no longer where they were; begin again without it")
    return cursor.rest
