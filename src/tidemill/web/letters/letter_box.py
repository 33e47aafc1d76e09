"""Reads dead letters for the web UI, as `tidemill dlq` does.

Invariants: one search at a time, so that readers cannot keep the brokers busy; a search ends after 20 s with what it
has found. Blocking: not for event loops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Criteria
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.opening import Letters, open_letters
from tidemill.deadletters.reader import Found, Reached
from tidemill.deadletters.search import Ranges, find_newest, read_all
from tidemill.web.letters.models import LetterPage, WholeLetter, describe_letter, describe_whole
from tidemill.web.problems import Problem

SEARCH_SECONDS = 20.0
AnswerT = TypeVar("AnswerT")


class _Bounded:
    """Letters that are read for a limited time."""

    def __init__(self, box: Letters, seconds: float) -> None:
        self._box = box
        self._until = time.monotonic() + seconds
        self.is_whole = True

    def find_offsets_at(self, seconds: float, ranges: Ranges) -> dict[int, int]:
        return self._box.find_offsets_at(seconds, ranges)

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Found | Reached | None]:
        for each in self._box.stream(starts, ends):
            if time.monotonic() >= self._until:
                self.is_whole = False
                return
            yield each


class LetterBox:
    """The dead letters of a pipeline.

    Args:
        settings: Of the pipeline.
        search_seconds: How long a search may take.
    """

    def __init__(self, settings: Settings, search_seconds: float = SEARCH_SECONDS) -> None:
        """Open nothing yet."""
        self._settings = settings
        self._seconds = search_seconds
        self._one_at_a_time = threading.Lock()

    def find(self, criteria: Criteria, limit: int) -> LetterPage:
        """Return the newest letters that match, the newest first.

        Raises:
            Problem: They cannot be read.
        """

        def search(box: Letters) -> LetterPage:
            bounded = _Bounded(box, self._seconds)
            found = find_newest(bounded, box.find_ranges(), criteria, limit)
            rows = [describe_letter(each, each.letter) for each in reversed(found) if each.letter is not None]
            return LetterPage(rows=rows, others=len(found) - len(rows), is_whole=bounded.is_whole, place=box.place)

        return self._ask(search)

    def read(self, letter_id: str) -> WholeLetter:
        """Return one letter.

        Raises:
            Problem: There is none with this id, or it cannot be read.
        """

        def search(box: Letters) -> WholeLetter:
            bounded = _Bounded(box, self._seconds)
            for each in read_all(bounded, box.find_ranges(), Criteria(ids=(letter_id,))):
                if each.letter is not None and each.letter.letter_id == letter_id:
                    return describe_whole(each, each.letter)
            late = "" if bounded.is_whole else f", or it was not found within {self._seconds:g} s"
            raise Problem(404, f"no letter {letter_id!r} in {box.place}{late}")

        return self._ask(search)

    def _ask(self, search: Callable[[Letters], AnswerT]) -> AnswerT:
        if not self._one_at_a_time.acquire(blocking=False):
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
