"""Decides which files of DAGs no worker of a queue has.

A worker that lacks a file claims no task of it. The tasks wait for another worker, and fail once no live worker of
their queue has had the file for too long. A new worker counts as one that has all files until it says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LackedFile:
    """A file that a worker lacks.

    Attributes:
        session: The session of the worker.
        path: The file, relative to the folder of DAGs.
        since_us: The time from which the worker has lacked it, in UTC microseconds.
    """

    session: int
    path: str
    since_us: int


@dataclass(frozen=True, slots=True)
class UnservedFile:
    """A file that no live worker of a queue has, since `since_us`."""

    queue: str
    path: str
    since_us: int


def find_unserved(workers: Mapping[int, Collection[str]], lacked: Iterable[LackedFile]) -> tuple[UnservedFile, ...]:
    """Return the files that no live worker of a queue has, by queue and path.

    Args:
        workers: The queues of each live worker, by session.
        lacked: The files that workers lack; those of other sessions are ignored.

    Example:
        >>> lacked = [LackedFile(1, "a.py", 5), LackedFile(2, "a.py", 7), LackedFile(1, "b.py", 5)]
        >>> find_unserved({1: ("default",), 2: ("default", "large")}, lacked)[0]
        UnservedFile(queue='default', path='a.py', since_us=7)
    """
    since: dict[str, dict[int, int]] = {}
    for one in lacked:
        if one.session in workers:
            since.setdefault(one.path, {})[one.session] = one.since_us
    sessions: dict[str, set[int]] = {}
    for session, queues in workers.items():
        for queue in queues:
            sessions.setdefault(queue, set()).add(session)
    return tuple(
        UnservedFile(queue, path, max(lacking[session] for session in serving))
        for queue, serving in sorted(sessions.items())
        for path, lacking in sorted(since.items())
        if serving <= lacking.keys()
    )


def describe_missing_file(path: str, queue: str, seconds: float) -> str:
    """Return the error of a task whose file no worker has.

    Args:
        path: The file.
        queue: The queue of the task.
        seconds: How long no worker has had the file at least.
    """
    return (
        f"MissingFileError: no live worker of queue {queue!r} has had the file {path} for {seconds:g} s "
        "(dags.missing_file_seconds); copy it to the DAG folders of these workers, or give the task a queue whose "
        "workers have it"
    )
