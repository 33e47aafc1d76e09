"""Reads dead letters for the web UI, as `tidemill dlq` does.

Invariants: one search runs at a time, so that readers cannot overload the brokers. A search ends within a second and
returns its results and a cursor, so that pages show progress. A listed letter is stored as a row only. The functions
block and must not run on event loops.
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
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.backwards import find_newest_first, restrict
from tidemill.deadletters.opening import Letters, open_letters
from tidemill.deadletters.reader import FoundLetter, LetterReader, Reached
from tidemill.deadletters.redrive.history import RedriveHistory, Redriven, read_history
from tidemill.deadletters.search import Ranges
from tidemill.web.letters.models import LetterPage, WholeLetter, describe_letter, describe_whole
from tidemill.web.problems import RequestProblem
from tidemill.web.workers import is_over

log = structlog.get_logger(__name__)

#: A list search returns its results and a cursor after this time.
SLICE_SECONDS = 0.6
#: How long the search for one letter may take.
SEARCH_SECONDS = 15.0
#: How long a search waits for another one.
WAIT_SECONDS = 4.0
#: How long the redrive history is cached, and how long after a failure it is read again.
HISTORY_SECONDS = 2.0
REFUSED_SECONDS = 10.0
#: Limits the size and the memory of a response.
MAX_ROWS = 500
#: A longer cursor does not fit into a request; the search then cannot be continued.
MAX_CURSOR_CHARS = 16_000
#: An upper bound of all times.
_MOST_SECONDS = 1e11
AnswerT = TypeVar("AnswerT")


class LetterCursor(msgspec.Struct, frozen=True, array_like=True):
    """The position at which a search continues.

    Attributes:
        since: The start of the period, in seconds since the epoch; "15m" ago would move with each page.
        until: The end of the period, likewise.
        count: The number of partitions or files.
        mark: A digest of their names.
        rest: The ends of the ranges that are still to be searched, by partition or file.
    """

    since: float | None
    until: float | None
    count: int
    mark: bytes
    rest: dict[int, int]


def open_cursor(text: str) -> LetterCursor | None:
    """Return the decoded cursor; None for ''.

    Raises:
        Problem: The cursor was not issued by this server.
    """
    if not text:
        return None
    with contextlib.suppress(ValueError):  # not base64, not MessagePack, or other types
        cursor = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.encode()), type=LetterCursor)
        if all(at is None or 0 <= at < _MOST_SECONDS for at in (cursor.since, cursor.until)):
            return cursor
    raise RequestProblem(422, "cursor: not issued by this server; repeat the search without it")


class _Bounded:
    """Reads letters until the request is over."""

    def __init__(self, box: Letters) -> None:
        self._box = box

    def find_offsets_at(self, seconds: float, ranges: Ranges) -> dict[int, int]:
        return self._box.find_offsets_at(seconds, ranges)

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[FoundLetter | Reached | None]:
        for each in self._box.stream(starts, ends):
            if is_over():
                raise RequestProblem(504, "the search for dead letters took too long; add filters")
            yield each


class LetterBox:
    """The dead letters of a pipeline.

    Args:
        settings: The pipeline's settings.
        slice_seconds: How long a list search may take.
        search_seconds: How long the search for one letter may take.
        wait_seconds: How long a search waits for another one.
        config: The file of the settings, for the commands on a letter's page; None: there is none.
    """

    def __init__(
        self,
        settings: Settings,
        slice_seconds: float = SLICE_SECONDS,
        search_seconds: float = SEARCH_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        *,
        config: Path | None = None,
    ) -> None:
        self._settings = settings
        self._config = str(config or "")
        self._slice_seconds = slice_seconds
        self._search_seconds = search_seconds
        self._wait_seconds = wait_seconds
        self._one_at_a_time = threading.Lock()
        self._history: RedriveHistory | None = None
        self._read_again_at = -math.inf

    def find(self, criteria: LetterCriteria, limit: int, cursor: LetterCursor | None = None) -> LetterPage:
        """Return the newest matching letters, newest first.

        Args:
            criteria: The filters.
            limit: The maximum number of rows, up to `MAX_ROWS`.
            cursor: The cursor of the previous page.

        Raises:
            Problem: The letters cannot be read.
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
                location=box.location,
            )

        return self._ask(search)

    def read(self, letter_id: str, at: tuple[int, int] | None = None) -> WholeLetter:
        """Return one letter.

        Args:
            letter_id: The letter's id.
            at: Its partition or file, and its offset or row, if known; this avoids a search.

        Raises:
            Problem: There is no letter with this id, or it cannot be read.
        """

        def search(box: Letters) -> WholeLetter:
            sent, allowed = self._find_history(box), self._settings.dlq.max_redrives
            ends_at = time.monotonic() + self._search_seconds
            ranges = box.find_ranges()
            for candidates in (_narrow(ranges, at), ranges):
                wanted = candidates
                while wanted:
                    found = find_newest_first(
                        _Bounded(box),
                        wanted,
                        LetterCriteria(ids=(letter_id,)),
                        MAX_ROWS,
                        lambda one: describe_whole(one, sent(one), allowed, self._config),
                        lambda: True,
                    )
                    whole = next((row for row in found.rows if row.letter_id == letter_id), None)
                    if whole is not None:
                        return whole
                    if found.rest and time.monotonic() >= ends_at:
                        late = f"letter {letter_id!r} was not found within {self._search_seconds:g} s"
                        raise RequestProblem(504, f"{late}; `tidemill dlq show` searches without a time limit")
                    wanted = restrict(wanted, found.rest)
            raise RequestProblem(404, f"no letter {letter_id!r} in {box.location}")

        return self._ask(search)

    def _find_history(self, box: Letters) -> Callable[[FoundLetter], list[Redriven] | None]:
        """Return a function that lists a letter's redrives; the function returns None if the history cannot be read."""
        if time.monotonic() >= self._read_again_at:
            pause = HISTORY_SECONDS
            try:
                self._history = read_history(self._settings, box)
            except RemoteError as error:
                # Listing consumer groups requires a separate permission; letters can be read without it.
                log.warning(
                    "cannot read the redrive history; the pages of dead letters do not show which were sent again",
                    error=str(error),
                )
                self._history, pause = None, REFUSED_SECONDS
            self._read_again_at = time.monotonic() + pause
        history = self._history
        return (lambda found: None) if history is None else history.list_redriven

    def _ask(self, search: Callable[[Letters], AnswerT]) -> AnswerT:
        if not self._one_at_a_time.acquire(timeout=self._wait_seconds):
            raise RequestProblem(
                429, "another search for dead letters is running; try again in a moment", {"Retry-After": "2"}
            )
        try:
            with open_letters(self._settings, "tidemill-web") as box:
                return search(box)
        except ConfigError as error:  # no pipeline has written a dead letter yet
            raise RequestProblem(404, str(error)) from error
        except RemoteError as error:
            raise RequestProblem(503, str(error)) from error
        finally:
            self._one_at_a_time.release()


def _narrow(ranges: Ranges, at: tuple[int, int] | None) -> dict[int, tuple[int, int]]:
    """Return the range of one position; empty if the position does not exist."""
    low, end = ranges.get(at[0], (0, 0)) if at is not None else (0, 0)
    return {at[0]: (at[1], at[1] + 1)} if at is not None and low <= at[1] < end else {}


def _mark(box: Letters, count: int) -> bytes:
    """Return a digest of the first partitions or files, to detect others under the same numbers."""
    names = [box.topic] if isinstance(box, LetterReader) else [box.identify(number)[0] for number in range(count)]
    return hashlib.blake2b("/".join(names).encode(errors="replace"), digest_size=8).digest()


def _make_cursor(criteria: LetterCriteria, box: Letters, ranges: Ranges, rest: Mapping[int, int]) -> str | None:
    cursor = LetterCursor(criteria.since, criteria.until, len(ranges), _mark(box, len(ranges)), dict(rest))
    text = base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).decode()
    return text if len(text) <= MAX_CURSOR_CHARS else None


def _check_rest(cursor: LetterCursor, box: Letters, ranges: Ranges) -> Mapping[int, int]:
    if not 0 <= cursor.count <= len(ranges) or cursor.mark != _mark(box, cursor.count):
        raise RequestProblem(409, "cursor: outdated, since the letters have moved; repeat the search without it")
    return cursor.rest
