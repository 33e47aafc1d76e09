"""Asks the reader of recordings for pages and API; what is asked is limited, and answered as models.

A cursor of ours holds the times of its query too: "15m" before now is another time with each page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tidemill.core.errors import RemoteError
from tidemill.core.recorder.cursor import WrongCursorError
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.file_layout import Period
from tidemill.recorder.reading.queries import EventQuery, MessageQuery, TaskQuery, list_cursors
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.reading.runs import RunChoice, RunFilter
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.web.problems import Problem
from tidemill.web.recorded import descriptions, models

QueryT = TypeVar("QueryT", MessageQuery, TaskQuery, EventQuery)
PageT = TypeVar("PageT")
FindOpen = Callable[[str, int, int], OpenMessage | None]

ALL_RUNS = RunFilter()
#: Times before 1970 are negative.
_CURSOR = re.compile(r"(-?\d{1,18}|)-(-?\d{1,18}|)-(\S{1,2000})")


def _open_cursor(query: QueryT, cursor: str) -> tuple[QueryT, str | None]:
    """Return the query with the times of its first page, and the reader's cursor."""
    if not cursor:
        return query, None
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise Problem(422, "cursor: this is not one that this server has given out; begin again without it")
    since, until = (int(text) if text else None for text in found.groups()[:2])
    return msgspec.structs.replace(query, since_us=since, until_us=until), found[3]


def _seal_cursor(query: QueryT, cursor: str | None) -> str | None:
    return None if cursor is None else _seal(query, cursor)


def _seal(query: QueryT, cursor: str) -> str:
    since, until = ("" if at is None else str(at) for at in (query.since_us, query.until_us))
    return f"{since}-{until}-{cursor}"


class Archive:
    """What was recorded.

    Args:
        reader: Of the recordings.
        max_rows: The most rows of an answer.
        find_open: Returns where a message is that is not finished, by topic, partition and offset; blocks, and may
            raise a RemoteError.
        group: The group of the pipeline or host whose web UI this is; None: that of no run.

    Attributes:
        group: The same.
    """

    def __init__(
        self, reader: Reader, max_rows: int, find_open: FindOpen | None = None, group: str | None = None
    ) -> None:
        self._find_open = find_open
        self.group = group
        self._reader = reader
        self.max_rows = max_rows

    @property
    def identity(self) -> str:
        """What servers of the same recordings have in common."""
        return self._reader.identity

    def _limit(self, limit: int) -> int:
        return max(1, min(limit, self.max_rows))

    def find_messages(
        self, query: MessageQuery, cursor: str, limit: int, *, each_cursor: bool = False
    ) -> models.MessagePage:
        """Return a page of messages."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_messages(query, inner, self._limit(limit)))
        letters = self._reader.find_dead_lettered(page.rows)
        rows = [
            descriptions.describe_message(row, dead_lettered=has) for row, has in zip(page.rows, letters, strict=True)
        ]
        each = [_seal(query, text) for text in list_cursors(page)] if each_cursor else []
        following = _seal_cursor(query, page.cursor)
        return models.MessagePage(rows=rows, cursor=following, problems=page.problems, cursors=each)

    def find_tasks(self, query: TaskQuery, cursor: str, limit: int, *, each_cursor: bool = False) -> models.TaskPage:
        """Return a page of tasks."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_tasks(query, inner, self._limit(limit)))
        rows = [descriptions.describe_task(row) for row in page.rows]
        each = [_seal(query, text) for text in list_cursors(page)] if each_cursor else []
        following = _seal_cursor(query, page.cursor)
        return models.TaskPage(rows=rows, cursor=following, problems=page.problems, cursors=each)

    def find_events(self, query: EventQuery, cursor: str, limit: int) -> models.EventPage:
        """Return a page of events."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_events(query, inner, self._limit(limit)))
        rows = [descriptions.describe_event(row) for row in page.rows]
        return models.EventPage(rows=rows, cursor=_seal_cursor(query, page.cursor), problems=page.problems)

    def list_failures(
        self, since_us: int | None, until_us: int | None, limit: int, runs: RunChoice = ALL_RUNS
    ) -> models.FailureList:
        """Return groups of failures."""
        found = self._reader.list_failures(since_us, until_us, self._limit(limit), runs)
        groups = [descriptions.describe_failure(group) for group in found.groups]
        return models.FailureList(groups=groups, more=found.more, problems=found.problems)

    def tell_story(self, topic: str, partition: int, offset: int) -> models.MessageStory:
        """Return what happened to a message."""
        story = descriptions.describe_story(self._reader.trace(topic, partition, offset))
        try:
            found = self._find_open(topic, partition, offset) if self._find_open is not None else None
        except RemoteError as error:
            story.problems.append(f"where the message is now is not known: {error}")
            found = None
        # That nobody owns the partition of a message that is committed says nothing about it.
        if found is not None and (found.engine is not None or all(told.committed_at is None for told in story.stories)):
            story.now = descriptions.describe_open(found)
        return story

    def read_counts(self, runs: RunChoice, since_us: int, until_us: int, step_seconds: int) -> list[Counts]:
        """Return what was counted in each step of a time, without steps in which nothing was."""
        return self._reader.read_counts(since_us, until_us, step_seconds, runs).points

    def list_runs(self) -> list[models.Run]:
        """Return the runs that have recordings: those that are being written first, then the newest first."""
        return [descriptions.describe_run(run) for run in self._reader.list_runs()]

    def list_recordings(self, runs: RunChoice = ALL_RUNS) -> list[models.Recording]:
        """Return the periods of some runs, the newest of each worker first."""
        found = [descriptions.describe_recording(info) for info in self._reader.list_recordings(runs)]
        # The oldest of each worker that is not being written, whatever the reason is.
        following = {row.recording: row for row in found if row.period and not row.live}
        for row in following.values():
            row.goes_next = True
        return found

    def find_periods(self, names: Sequence[str]) -> list[Period]:
        """Return periods by RECORDING/PERIOD.

        Raises:
            Problem: One of them is not listed.
        """
        found = []
        for name in dict.fromkeys(names):
            recording, _, period = name.partition("/")
            listed = self._reader.find_period(recording, period)
            if listed is None:
                raise Problem(404, f"no recording {name!r} on disk; see /api/v1/recordings")
            found.append(listed)
        return found


def _ask(question: Callable[[], PageT]) -> PageT:
    try:
        return question()
    except WrongCursorError as error:
        raise Problem(422, f"cursor: {error}") from error
