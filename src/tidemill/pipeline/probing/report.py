"""Builds the report of a probe, with limited numbers of entries and limited text."""

from __future__ import annotations

import time

from tidemill.core.errors import escape_surrogates
from tidemill.core.wording import format_count
from tidemill.deadletters.payloads import encode_payload
from tidemill.pipeline.probing.observed_handler import HookCall
from tidemill.pipeline.probing.probe_run import ProbeRun
from tidemill.pipeline.probing.texts import NOTHING, Room
from tidemill.pipeline.recording.texts import clean_args
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.recorder.format.recordable_text import clean_error, clean_name
from tidemill.runtime.link.probe_report import (
    ProbeAttempt,
    ProbeLetter,
    ProbePayload,
    ProbeReport,
    ProbeStage,
    ProbeStatus,
    ProbeTask,
)

MOST_STAGES = 200
MOST_TASKS = 100
MOST_ATTEMPTS = 10
MOST_PAYLOADS = 100
MOST_LETTERS = 50
_MOST_LABELS = 20
_MOST_OFFENDERS = 5


def tell(run: ProbeRun, why_unfinished: str) -> ProbeReport:
    """Return the report of a probe.

    Args:
        run: The probe, before its unfinished work is stopped.
        why_unfinished: Why the probe stopped, in case the message did not finish.
    """
    now, room, tasks = time.monotonic(), Room(), run.list_tasks()
    status, text = _judge(run, why_unfinished, tasks)
    # Users look for failures, so these get their share of the text first.
    letters = [
        ProbeLetter(letter.kind.value, room.fit(letter.error), clean_name(letter.task_id or ""))
        for letter in run.letters.letters[:MOST_LETTERS]
    ]
    stages = [_describe_stage(run, stage, room) for stage in run.stages.calls[:MOST_STAGES]]
    told = [_describe_task(run, task, room, now) for task in tasks[:MOST_TASKS]]
    payloads = [
        ProbePayload(
            each.sink,
            each.origin.hook,
            clean_name(each.origin.task.task_id) if each.origin.task is not None else "",
            room.fit_json(encode_payload(each.payload)),
        )
        for each in run.delivery.payloads[:MOST_PAYLOADS]
    ]
    left_out = run.letters.count - len(letters) + run.stages.count - len(stages) + len(tasks) - len(told)
    left_out += run.delivery.sinks.total() - len(payloads)
    left_out += sum(max(0, len(run.attempts.get(task, ())) - MOST_ATTEMPTS) for task in tasks[:MOST_TASKS])
    return ProbeReport(
        status,
        text,
        round(now - run.began, 6),
        stages,
        told,
        payloads,
        dict(run.delivery.sinks),
        letters,
        run.cache.writes if run.cache is not None else 0,
        left_out,
    )


def _judge(run: ProbeRun, why_unfinished: str, tasks: list[TaskInFlight]) -> tuple[ProbeStatus, str]:
    if run.fault:
        return ProbeStatus.UNFINISHED, clean_error(run.fault)
    if not run.is_over:
        return ProbeStatus.UNFINISHED, f"{why_unfinished}{_name_what_runs(run)}"
    if run.letters.count:
        return ProbeStatus.FAILED, f"it would have written {format_count(run.letters.count, 'dead letter')}"
    if any(task.error is not None and not task.replaced for task in tasks):
        return ProbeStatus.FAILED, "a task failed, and on_error skipped it"
    sinks = run.delivery.sinks
    what = f"{format_count(sinks.total(), 'payload')} for {format_count(len(sinks), 'sink')}" if sinks else "no payload"
    return ProbeStatus.DONE, f"{format_count(len(tasks), 'task')}, {what}"


def _name_what_runs(run: ProbeRun) -> str:
    hooks = dict.fromkeys(stage.hook for stage in run.stages.calls if stage.ended_at is None)
    running = [task.task.task_id for task, _ in run.pool.list_running(_MOST_OFFENDERS)]
    names = [
        *(f"{hook} has not returned" for hook in hooks),
        *(f"task {clean_name(task)} is running" for task in running),
    ]
    if not names and run.pool.statistics().retrying:
        names = ["a task is waiting for its next attempt"]
    return f": {', '.join(names)}" if names else ""


def _describe_stage(run: ProbeRun, stage: HookCall, room: Room) -> ProbeStage:
    trace = stage.trace or (stage.describe_wait() if stage.ended_at is None else "")
    return ProbeStage(
        stage.hook,
        clean_name(stage.about),
        round(stage.at - run.began, 6),
        None if stage.ended_at is None else round(stage.ended_at - stage.at, 6),
        room.fit(trace) if trace else NOTHING,
    )


def _describe_task(run: ProbeRun, task: TaskInFlight, room: Room, now: float) -> ProbeTask:
    found = task.task
    ended = run.attempts.get(task, [])
    attempts = [_describe_attempt(run, *each, room) for each in ended[:MOST_ATTEMPTS]]
    started_at = getattr(task.process, "started_at", 0.0) if task.process is not None else 0.0
    if started_at:
        pid = getattr(task.process, "pid", None)
        at = round(started_at - run.began, 6)
        attempts.append(ProbeAttempt(task.attempts, at, None, "", None, pid, NOTHING, NOTHING, NOTHING))
    return ProbeTask(
        clean_name(found.task_id),
        clean_name(found.parent_task_id or ""),
        clean_args(found.args),
        {clean_name(name): clean_error(text) for name, text in list(found.labels.items())[:_MOST_LABELS]},
        _find_state(run, task, is_running=bool(started_at)),
        found.precomputed is not None,
        attempts,
    )


def _find_state(run: ProbeRun, task: TaskInFlight, *, is_running: bool) -> str:
    if task.replaced:
        return "replaced"
    if task.error is not None or task.failure is not None:
        return "failed"
    if is_running:
        return "running"
    if task.result is not None:
        return "hook" if task.key in run.pending and run.pending[task.key] is task else "ok"
    is_asked = any(stage.hook == "on_error" and stage.ended_at is None for stage in run.stages.calls)
    return "hook" if is_asked and task in run.attempts else "waiting"


def _describe_attempt(
    run: ProbeRun, attempt: int, queued_at: float, ended_at: float, outcome: ProcessOutcome, room: Room
) -> ProbeAttempt:
    started_at = max(queued_at, ended_at - outcome.duration_seconds)
    return ProbeAttempt(
        attempt,
        round(started_at - run.began, 6),
        round(outcome.duration_seconds, 6),
        "ok" if outcome.kind is None else outcome.kind.value,
        outcome.exit_code,
        outcome.pid,
        room.fit(escape_surrogates(outcome.exception)) if outcome.exception else NOTHING,
        room.fit_end(outcome.stdout),
        room.fit_end(outcome.stderr),
    )
