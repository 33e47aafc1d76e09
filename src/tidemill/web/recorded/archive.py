"""Queries the reader of recordings for pages and API; results are limited, and returned as models.

A cursor also holds the times of its query, since "15m" ago would move with each page.
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
from tidemill.web.problems import RequestProblem
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
        raise RequestProblem(422, "cursor: not issued by this server; repeat the search without it")
    since, until = (int(text) if text else None for text in found.groups()[:2])
    return msgspec.structs.replace(query, since_us=since, until_us=until), found[3]


def _seal_cursor(query: QueryT, cursor: str | None) -> str | None:
    return None if cursor is None else _seal(query, cursor)


def _seal(query: QueryT, cursor: str) -> str:
    since, until = ("" if at is None else str(at) for at in (query.since_us, query.until_us))
    return f"{since}-{until}-{cursor}"


class Archive:
    """The recordings, as pages and API read them.

    Args:
        reader: Reads the recordings.
        max_rows: The maximum number of rows in an answer.
        find_open: Returns the current stage of an unfinished message, by topic, partition and offset; blocks, and may
            raise a RemoteError.
        group: The group of the pipeline or host that serves this web UI; None: there is none.

    Attributes:
        group: The same group.
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
        """The identity of the recordings; equal for all servers of one folder."""
        return self._reader.identity

    def _limit(self, limit: int) -> int:
        return max(1, min(limit, self.max_rows))

    def find_messages(
        self, query: MessageQuery, cursor: str, limit: int, *, each_cursor: bool = False
    ) -> models.MessagePageView:
        """Return a page of messages."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_messages(query, inner, self._limit(limit)))
        letters = self._reader.find_dead_lettered(page.rows)
        rows = [
            descriptions.describe_message(row, dead_lettered=has) for row, has in zip(page.rows, letters, strict=True)
        ]
        each = [_seal(query, text) for text in list_cursors(page)] if each_cursor else []
        following = _seal_cursor(query, page.cursor)
        return models.MessagePageView(rows=rows, cursor=following, problems=page.problems, cursors=each)

    def find_tasks(
        self, query: TaskQuery, cursor: str, limit: int, *, each_cursor: bool = False
    ) -> models.TaskPageView:
        """Return a page of tasks."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_tasks(query, inner, self._limit(limit)))
        rows = [descriptions.describe_task(row) for row in page.rows]
        each = [_seal(query, text) for text in list_cursors(page)] if each_cursor else []
        following = _seal_cursor(query, page.cursor)
        return models.TaskPageView(rows=rows, cursor=following, problems=page.problems, cursors=each)

    def find_events(self, query: EventQuery, cursor: str, limit: int) -> models.EventPageView:
        """Return a page of events."""
        query, inner = _open_cursor(query, cursor)
        page = _ask(lambda: self._reader.find_events(query, inner, self._limit(limit)))
        rows = [descriptions.describe_event(row) for row in page.rows]
        return models.EventPageView(rows=rows, cursor=_seal_cursor(query, page.cursor), problems=page.problems)

    def list_failures(
        self, since_us: int | None, until_us: int | None, limit: int, runs: RunChoice = ALL_RUNS
    ) -> models.FailureListView:
        """Return groups of failures."""
        found = self._reader.list_failures(since_us, until_us, self._limit(limit), runs)
        groups = [descriptions.describe_failure(group) for group in found.groups]
        return models.FailureListView(groups=groups, more=found.more, problems=found.problems)

    def tell_story(self, topic: str, partition: int, offset: int) -> models.MessageStory:
        """Return the history of a message."""
        story = descriptions.describe_story(self._reader.trace(topic, partition, offset))
        try:
            found = self._find_open(topic, partition, offset) if self._find_open is not None else None
        except RemoteError as error:
            story.problems.append(f"the current stage of the message cannot be read: {error}")
            found = None
        # For a committed message it is irrelevant that no engine owns its partition.
        if found is not None and (found.engine is not None or all(told.committed_at is None for told in story.stories)):
            story.now = descriptions.describe_open(found)
        return story

    def read_counts(self, runs: RunChoice, since_us: int, until_us: int, step_seconds: int) -> list[Counts]:
        """Return the counts of each step of a period; steps without counts are left out."""
        return self._reader.read_counts(since_us, until_us, step_seconds, runs).points

    def list_runs(self) -> list[models.StoredRunView]:
        """Return the runs that have recordings: live runs first, then newest first."""
        return [descriptions.describe_run(run) for run in self._reader.list_runs()]

    def list_recordings(self, runs: RunChoice = ALL_RUNS) -> list[models.RecordingView]:
        """Return the periods of some runs, newest first per worker."""
        found = [descriptions.describe_recording(info) for info in self._reader.list_recordings(runs)]
        # The oldest period of each worker that is not being written, for whatever reason.
        following = {row.recording: row for row in found if row.period and not row.live}
        for row in following.values():
            row.goes_next = True
        return found

    def find_periods(self, names: Sequence[str]) -> list[Period]:
        """Return periods by RECORDING/PERIOD.

        Raises:
            Problem: A period is not listed.
        """
        found = []
        for name in dict.fromkeys(names):
            recording, _, period = name.partition("/")
            listed = self._reader.find_period(recording, period)
            if listed is None:
                raise RequestProblem(404, f"there is no recording {name!r} on disk; list them with /api/v1/recordings")
            found.append(listed)
        return found


def _ask(question: Callable[[], PageT]) -> PageT:
    try:
        return question()
    except WrongCursorError as error:
        raise RequestProblem(422, f"cursor: {error}") from error
