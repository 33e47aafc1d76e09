"""Assembles the stories of a message from its rows, tasks, events and commits.

A message that was reprocessed has several rows. A task belongs to the row of the same engine in whose time it was
queued, an event to the first row resolved after it; what remains belongs to a processing without a row (yet).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tidemill.recorder.reading.queries import RecordedEventRow, RecordedMessageRow, RecordedTaskRow, Story, Trace

#: The time after a message's resolution in which its commit is searched.
COMMIT_SECONDS = 600
_MILLION = 1_000_000


def tell_stories(
    messages: Sequence[RecordedMessageRow],
    tasks: Sequence[RecordedTaskRow],
    events: Sequence[RecordedEventRow],
    find_commit: Callable[[int, int], int | None],
    bounded: Collection[str] = (),
) -> Trace:
    """Return the stories of one message.

    Args:
        messages: Its rows.
        tasks: Its tasks.
        events: Its events.
        find_commit: Returns the first second in a given range in which its offset was seen as committed.
        bounded: The recordings of bounded runs, which commit nothing.
    """
    rows = sorted(messages, key=lambda row: row.resolved_at or 0)
    left_tasks = sorted(tasks, key=lambda task: (task.started_at or task.queued_at or 0, task.attempt))
    left_events = sorted(events, key=lambda row: row.event.at_us)
    stories = []
    for row in rows:
        mine = [task for task in left_tasks if _is_task_of(task, row)]
        left_tasks = [task for task in left_tasks if task not in mine]
        during = [event for event in left_events if _is_event_of(event, row)]
        left_events = [event for event in left_events if event not in during]
        is_bounded = row.recording in bounded
        committed, exactly = row.committed_at, row.committed_at is not None
        if committed is None and not is_bounded and row.resolved_at is not None:
            second = row.resolved_at // _MILLION
            seen = find_commit(second, second + COMMIT_SECONDS)
            committed = None if seen is None else max(seen * _MILLION, row.resolved_at)
        stories.append(Story(row, mine, during, committed, exactly, is_bounded))
    return Trace(stories, left_events, left_tasks)


def _is_task_of(task: RecordedTaskRow, row: RecordedMessageRow) -> bool:
    if (task.recording, task.engine_id) != (row.recording, row.engine_id):
        return False
    at = task.queued_at or task.started_at or task.ended_at or 0
    return (row.consumed_at or 0) <= at <= (row.resolved_at or 0)


def _is_event_of(event: RecordedEventRow, row: RecordedMessageRow) -> bool:
    return event.recording == row.recording and event.event.at_us <= (row.resolved_at or 0)
