"""Converts results of the recorder into models of the REST API."""

from __future__ import annotations

from tidemill.core.recorder.key_text import write_key
from tidemill.recorder.reading.queries import (
    FailureGroup,
    RecordedEventRow,
    RecordedMessageRow,
    RecordedTaskRow,
    RecordingInfo,
    Story,
    Trace,
)
from tidemill.recorder.reading.runs import StoredRun
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.web.recorded.models import (
    MILLION,
    FailureGroupView,
    MessageHistory,
    MessageStory,
    OpenPosition,
    RecordedEventView,
    RecordedMessageView,
    RecordedTaskView,
    RecordingView,
    StoredRunView,
    measure,
    show_bytes,
    to_seconds,
)


def describe_open(message: OpenMessage) -> OpenPosition:
    stage = message.stage
    return OpenPosition(
        engine=message.engine,
        stage=stage.stage.value,
        text=message.text,
        seconds=stage.seconds,
        task_id=stage.task_id,
        attempt=stage.attempt,
        attempts=stage.attempts,
        pid=stage.pid,
        next_seconds=stage.next_seconds,
        behind=stage.behind,
        hook=stage.hook,
        sink=stage.sink,
    )


def describe_message(row: RecordedMessageRow, *, dead_lettered: bool = False) -> RecordedMessageView:
    return RecordedMessageView(
        recording=row.recording,
        engine=row.engine,
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
        key=None if row.key is None else write_key(row.key),
        status=row.status,
        dead_lettered=dead_lettered,
        error=row.error,
        seconds=measure(row.consumed_at, row.resolved_at),
        record_at=to_seconds(row.record_at),
        consumed_at=to_seconds(row.consumed_at),
        arranged_at=to_seconds(row.arranged_at),
        tasks_done_at=to_seconds(row.tasks_done_at),
        resolved_at=to_seconds(row.resolved_at),
        committed_at=to_seconds(row.committed_at),
        window=row.window,
        tasks=row.tasks,
        precomputed=row.precomputed,
        attempts=row.attempts,
        payloads=row.payloads,
    )


def describe_task(row: RecordedTaskRow) -> RecordedTaskView:
    return RecordedTaskView(
        recording=row.recording,
        engine=row.engine,
        task_id=row.task_id,
        topic=row.topic,
        partition=row.partition,
        offsets=row.offsets,
        args=row.args,
        labels=row.labels,
        slot=row.slot,
        pid=row.pid,
        kind=row.kind,
        attempt=row.attempt,
        exit_code=row.exit_code,
        queued_at=to_seconds(row.queued_at),
        started_at=to_seconds(row.started_at),
        ended_at=to_seconds(row.ended_at),
        seconds=measure(row.started_at, row.ended_at),
        waited_seconds=measure(row.queued_at, row.started_at),
        input_bytes=row.input_bytes,
        output_bytes=row.output_bytes,
        parent=row.parent,
        stdout=show_bytes(row.stdout),
        stderr=show_bytes(row.stderr),
        stdin=show_bytes(row.stdin),
        error=row.error,
    )


def describe_event(row: RecordedEventRow) -> RecordedEventView:
    event = row.event
    return RecordedEventView(
        recording=row.recording,
        at=event.at_us / MILLION,
        kind=event.kind.value,
        topic=event.topic,
        partition=event.partition,
        offset=event.offset,
        task_id=event.task_id,
        sink=event.sink,
        text=event.text,
        error_class=event.error_class,
        data=event.data,
    )


def describe_failure(group: FailureGroup) -> FailureGroupView:
    return FailureGroupView(
        error_class=group.error_class,
        count=group.count,
        kinds=group.kinds,
        first_at=group.first_us / MILLION,
        last_at=group.last_us / MILLION,
        minutes=group.minutes,
        example=None if group.example is None else describe_event(group.example),
    )


def describe_run(run: StoredRun) -> StoredRunView:
    return StoredRunView(
        recording=run.recording,
        group=run.group,
        worker=run.worker,
        started_at=run.started_us / MILLION,
        written_at=run.written_us / MILLION,
        live=run.live,
        bounded=run.bounded,
        periods=run.periods,
    )


def describe_recording(info: RecordingInfo) -> RecordingView:
    """Return a period without the path of its files, which only the host may know."""
    return RecordingView(
        recording=info.recording,
        period=info.period,
        group=info.group,
        worker=info.worker,
        started_at=info.started_us / MILLION,
        first_at=to_seconds(info.first_us),
        last_at=to_seconds(info.last_us),
        messages=info.messages,
        tasks=info.tasks,
        events=info.events,
        size_bytes=info.size_bytes,
        live=info.live,
        bounded=info.bounded,
        kept_until=to_seconds(info.kept_until_us),
        problems=info.problems,
    )


def describe_story(trace: Trace) -> MessageStory:
    return MessageStory(
        stories=[_describe_told(story) for story in trace.stories],
        tasks=[describe_task(task) for task in trace.tasks],
        events=[describe_event(event) for event in trace.events],
        kept_from=to_seconds(trace.kept_from_us),
        kept_to=to_seconds(trace.kept_to_us),
        problems=trace.problems,
    )


def _describe_told(story: Story) -> MessageHistory:
    return MessageHistory(
        message=describe_message(story.message, dead_lettered=story.is_dead_lettered),
        tasks=[describe_task(task) for task in story.tasks],
        events=[describe_event(event) for event in story.events],
        committed_at=to_seconds(story.committed_us),
        committed_exactly=story.committed_exactly,
        bounded=story.bounded,
    )
