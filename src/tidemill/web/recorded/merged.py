"""Merges recordings of peers with recordings of this host: messages, tasks, failures.

Invariants: rows of a host keep their order. A row appears on one page only, since the cursor holds the position in each
host. A host that does not answer is named, and the next page continues at its old position. Peers return their own
recordings only, not recordings of their peers.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from tidemill.recorder.reading.queries import MessageQuery, TaskQuery
from tidemill.recorder.reading.runs import RunChoice, RunFilter
from tidemill.web.peers.peers import Peers
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded import models
from tidemill.web.recorded.archive import Archive

#: The name of this host in cursors.
_HERE = ""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PageT = TypeVar("PageT", models.MessagePageView, models.TaskPageView)
RowT = TypeVar("RowT", models.RecordedMessageView, models.RecordedTaskView)
#: The position in each host: '' at the beginning, None at the end.
Cursors = dict[str, str | None]


class Head(Generic[RowT]):
    """The rows of a host that are still to be shown.

    Args:
        host: The host's name.
        rows: The rows.
        cursors: For each row, the cursor of a page that begins after it.
        following: The cursor of the next page; None if there is none.
    """

    def __init__(self, host: str, rows: list[RowT], cursors: list[str], following: str | None) -> None:
        self.host = host
        self.rows: list[RowT] = rows
        self.taken = 0
        self._cursors = cursors
        self._following = following

    def find_cursor(self, before: str | None) -> str | None:
        """Return the position at which this host continues."""
        if self.taken == len(self.rows):
            return self._following
        return self._cursors[self.taken - 1] if self.taken else before


def merge_rows(heads: Sequence[Head[RowT]], limit: int, find_time: Callable[[RowT], float | None]) -> list[RowT]:
    """Return the newest rows of all hosts, at most `limit`; rows of a host keep their order."""
    rows: list[RowT] = []
    while len(rows) < limit:
        open_ones = [head for head in heads if head.taken < len(head.rows)]
        if not open_ones:
            break
        newest = max(open_ones, key=lambda head: find_time(head.rows[head.taken]) or 0.0)
        rows.append(newest.rows[newest.taken])
        newest.taken += 1
    return rows


class MergedArchive:
    """The recordings of this host and its peers.

    Args:
        archive: The recordings of this host.
        peers: The other hosts.
    """

    def __init__(self, archive: Archive, peers: Peers) -> None:
        self._archive = archive
        self.peers = peers

    def find_messages(self, query: MessageQuery, cursor: str, limit: int) -> models.MessagePageView:
        """Return a page of the messages of all hosts; see `Archive.find_messages`."""
        if not self.peers.addresses:
            return self._archive.find_messages(query, cursor, limit)
        asked = _describe_query(query)
        asked += [("key", query.key.decode("utf-8", "replace"))] if query.key is not None else []
        asked += [("error", query.error)] if query.error else []
        asked += [("status", status) for status in query.statuses]

        def find_here(position: str) -> models.MessagePageView:
            return self._archive.find_messages(query, position, limit, each_cursor=True)

        pages, cursors, missing = self._ask(models.MessagePageView, "/messages", asked, cursor, limit, find_here)
        heads = [Head(host, page.rows, page.cursors, page.cursor) for host, page in pages.items()]
        rows = merge_rows(heads, limit, lambda row: row.resolved_at)
        following = _seal(cursors, heads, missing)
        return models.MessagePageView(rows=rows, cursor=following, problems=_list_problems(pages), missing=missing)

    def find_tasks(self, query: TaskQuery, cursor: str, limit: int) -> models.TaskPageView:
        """Return a page of the tasks of all hosts; see `Archive.find_tasks`."""
        if not self.peers.addresses:
            return self._archive.find_tasks(query, cursor, limit)
        asked = [*_describe_query(query), *(("kind", kind) for kind in query.kinds)]

        def find_here(position: str) -> models.TaskPageView:
            return self._archive.find_tasks(query, position, limit, each_cursor=True)

        pages, cursors, missing = self._ask(models.TaskPageView, "/tasks", asked, cursor, limit, find_here)
        heads = [Head(host, page.rows, page.cursors, page.cursor) for host, page in pages.items()]
        rows = merge_rows(heads, limit, lambda row: row.ended_at)
        following = _seal(cursors, heads, missing)
        return models.TaskPageView(rows=rows, cursor=following, problems=_list_problems(pages), missing=missing)

    def _ask(
        self,
        kind: type[PageT],
        path: str,
        asked: Sequence[tuple[str, str]],
        cursor: str,
        limit: int,
        find_here: Callable[[str], PageT],
    ) -> tuple[dict[str, PageT], Cursors, dict[str, str]]:
        """Return the pages of hosts that have answered, the position of each host, and the problems of the others."""
        cursors = _open(cursor, [_HERE, *self.peers.addresses])
        own: list[tuple[str, str]] = [*asked, ("limit", str(limit)), ("each_cursor", "true")]
        queries = {
            host: [*own, ("cursor", position)]
            for host, position in cursors.items()
            if host != _HERE and position is not None
        }
        wait = self.peers.begin(path, queries, kind)
        here = cursors[_HERE]
        pages = {} if here is None else {_HERE: find_here(here)}
        missing = {}
        for answer in wait():
            if answer.value is None:
                missing[answer.name] = answer.problem
            elif len(answer.value.rows) != len(answer.value.cursors) or len(answer.value.rows) > limit:
                missing[answer.name] = "the response does not match the request; use one version of tidemill"
            else:
                for row in answer.value.rows:
                    row.host = answer.name
                pages[answer.name] = answer.value
        return pages, cursors, missing

    def list_failures(
        self, since_us: int | None, until_us: int | None, limit: int, runs: RunFilter
    ) -> models.FailureListView:
        """Return the groups of failures of all hosts."""
        if not self.peers.addresses:
            return self._archive.list_failures(since_us, until_us, limit, runs)
        asked = [*_describe_runs(runs), *_describe_times(since_us, until_us), ("limit", str(limit))]
        wait = self.peers.begin("/failures", dict.fromkeys(self.peers.addresses, asked), models.FailureListView)
        found = self._archive.list_failures(since_us, until_us, limit, runs)
        groups = {group.error_class: group for group in found.groups}
        for answer in wait():
            if answer.value is None:
                found.missing[answer.name] = answer.problem
                continue
            found.more += answer.value.more
            found.problems += [f"{answer.name}: {problem}" for problem in answer.value.problems]
            for group in answer.value.groups:
                group.hosts = [answer.name]
                if group.example is not None:
                    group.example.host = answer.name
                known = groups.get(group.error_class)
                groups[group.error_class] = group if known is None else _add_group(known, group)
        ranked = sorted(
            groups.values(), key=lambda group: (-group.count, -sum(group.kinds.values()), group.error_class)
        )
        found.groups, found.more = ranked[:limit], found.more + len(ranked[limit:])
        return found


def _add_group(known: models.FailureGroupView, other: models.FailureGroupView) -> models.FailureGroupView:
    kinds, minutes = dict(known.kinds), dict(known.minutes)
    for kind, count in other.kinds.items():
        kinds[kind] = kinds.get(kind, 0) + count
    for minute, count in other.minutes:
        minutes[minute] = minutes.get(minute, 0) + count
    return models.FailureGroupView(
        error_class=known.error_class,
        count=known.count + other.count,
        kinds=kinds,
        first_at=min(known.first_at, other.first_at),
        last_at=max(known.last_at, other.last_at),
        minutes=sorted(minutes.items()),
        hosts=[*known.hosts, *other.hosts],
        example=known.example or other.example,
    )


def _describe_query(query: MessageQuery | TaskQuery) -> list[tuple[str, str]]:
    """Return the filters that messages and tasks share, as query parameters."""
    values = {
        "topic": query.topic,
        "partition": query.partition,
        "offset": query.offset,
        "task": query.task_id,
        "label": query.label,
        "min_seconds": query.min_seconds,
        "max_seconds": query.max_seconds,
    }
    given = [(name, str(value)) for name, value in values.items() if value is not None]
    return [*given, *_describe_runs(query), *_describe_times(query.since_us, query.until_us)]


def _describe_runs(runs: RunChoice) -> list[tuple[str, str]]:
    values = {"recording": runs.recording, "group": runs.group, "worker": runs.worker}
    return [(name, value) for name, value in values.items() if value is not None]


def _describe_times(since_us: int | None, until_us: int | None) -> list[tuple[str, str]]:
    times = {"since": since_us, "until": until_us}
    # Always absolute: the peer's clock may differ, so "15m" would mean another time there.
    return [(name, (_EPOCH + timedelta(microseconds=at)).isoformat()) for name, at in times.items() if at is not None]


def _list_problems(pages: Mapping[str, models.MessagePageView | models.TaskPageView]) -> list[str]:
    return [f"{host}: {problem}" if host else problem for host, page in pages.items() for problem in page.problems]


def _open(cursor: str, hosts: Sequence[str]) -> Cursors:
    """Return the position of each host in a cursor.

    Raises:
        Problem: The cursor was not issued by this server.
    """
    if not cursor:
        return dict.fromkeys(hosts, "")
    try:
        found = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        position is None or isinstance(position, str) for position in found.values()
    ):
        raise RequestProblem(422, "cursor: not issued by this server; repeat the search without it")
    return {host: found.get(host, "") for host in hosts}


def _seal(cursors: Cursors, heads: Sequence[Head[RowT]], missing: Mapping[str, str]) -> str | None:
    """Return the cursor of the next page; None if no host that answers has more rows."""
    following = dict(cursors)
    for head in heads:
        following[head.host] = head.find_cursor(cursors[head.host])
    if all(position is None or host in missing for host, position in following.items()):
        return None
    return base64.urlsafe_b64encode(json.dumps(following).encode()).decode().rstrip("=")
