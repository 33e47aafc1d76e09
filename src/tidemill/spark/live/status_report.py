"""The answer of a running pipeline to `tidemill status`: one JSON document built from its state and progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.runtime.link.progress import GROUP_NAME, PartitionHead
from tidemill.runtime.log.setup import version
from tidemill.spark.progress import EngineStatus, PipelineProgress
from tidemill.spark.run_state import RunPhase, RunState

#: An engine sends a beat four times a second. If it is silent for this long, it hangs or its host is overloaded.
SILENT_SECONDS = 10.0
#: The states of a healthy slot.
_WELL = ("running", "finished")


def build_report(
    settings: Settings,
    worker: str,
    state: RunState,
    progress: PipelineProgress,
    rate: float,
    addresses: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Return the status document.

    Args:
        settings: The settings of the pipeline; no secrets are read.
        worker: The worker name.
        state: The current state of the run.
        progress: The sums over its engines.
        rate: The number of messages per second.
        addresses: The URL of metrics and health as `metrics`, and that of the web UI, with its key, as `web`.
    """
    kafka = settings.kafka
    problems = find_problems(state, progress)
    return {
        "kind": "pipeline",
        "version": version(),
        "worker": worker,
        "consumer_group": kafka.consumer_group,
        "brokers": kafka.brokers,
        "topic": kafka.source_topic,
        "state": "starting" if is_starting(state, progress) else state.phase.value,
        "healthy": not problems,
        "problems": problems,
        "run_seconds": round(state.run_seconds, 1),
        "engines": [_describe_engine(engine) for engine in progress.engines],
        "partitions": len(progress.partitions),
        "messages_done": progress.messages_done,
        "messages_per_second": round(rate, 1),
        "in_flight": progress.in_flight,
        "lag": sum(progress.lag.values()) if progress.lag else None,
        "partitions_without_lag": len(set(progress.partitions) - progress.lag.keys()),
        "tasks": {
            "running": progress.tasks_running,
            "queued": progress.tasks_queued,
            "in_backoff": progress.tasks_retrying,
            "done": progress.tasks_done,
            "failed": progress.tasks_failed,
            "retried": progress.tasks_retried,
        },
        "dead_letters": {"written": progress.dead_lettered, "kinds": progress.letter_kinds}
        | {"dropped": progress.letters_dropped},
        "paused": [msgspec.to_builtins(pause) for pause in progress.pauses],
        "recorder": {"dropped": progress.recorder_dropped},
        "sinks": {path: msgspec.to_builtins(stats) for path, stats in progress.sinks.items()},
        "waits_for": progress.waits,
        "held_by": {name: describe_head(name, head) for name, head in sorted(progress.heads.items())},
        "metrics": (addresses or {}).get("metrics"),
        "web": (addresses or {}).get("web"),
    }


def describe_head(name: str, head: PartitionHead) -> dict[str, Any]:
    """Return the oldest open message of a partition: since when it is the oldest, and at which stage it is."""
    return {
        "message": f"{name.rpartition('/')[0]}:{name.rpartition('/')[2]}:{head.offset}",
        "since": head.since,
        "written_at": head.written_at,
        "stage": head.stage or "moving",
        "text": redact_text(head.text),
        "buffered": head.buffered,
    }


def find_problems(state: RunState, progress: PipelineProgress) -> list[str]:
    """Return why a pipeline is not running as it should.

    Waiting for an external system is not a problem of the pipeline, unless it will not end by itself: brokers that
    refuse the pipeline.

    Example:
        >>> find_problems(RunState(step="Spark is starting", step_seconds=3), PipelineProgress())
        ['it is starting: Spark is starting (3 s)']
    """
    if is_starting(state, progress):
        step = state.describe_step() or ("the engines are starting" if progress.engines else "")
        return [f"it is starting: {step}" if step else "it is starting"]
    if state.phase is RunPhase.STOPPING:
        return ["it is stopping"]
    problems = []
    for engine in progress.engines:
        if engine.state not in _WELL:
            problems.append(f"engine {engine.slot} is not running: {engine.state} (start {engine.starts})")
        elif engine.silent_seconds is not None and engine.silent_seconds >= SILENT_SECONDS:
            problems.append(f"engine {engine.slot} has been silent for {engine.silent_seconds:.0f} s")
    if GROUP_NAME in progress.waits:
        problems.append(f"it cannot read its topic: {progress.waits[GROUP_NAME]}")
    return problems


def is_starting(state: RunState, progress: PipelineProgress) -> bool:
    """Return whether no engine has worked yet."""
    if state.phase is RunPhase.RUNNING:
        return not any(engine.progress or engine.starts > 1 for engine in progress.engines)
    return state.phase is RunPhase.STARTING


def _describe_engine(engine: EngineStatus) -> dict[str, Any]:
    return {
        "slot": engine.slot,
        "state": engine.state,
        "host": engine.host,
        "pid": engine.pid,
        "starts": engine.starts,
        "silent_seconds": None if engine.silent_seconds is None else round(engine.silent_seconds, 1),
        "partitions": len(engine.progress.partitions) if engine.progress is not None else 0,
    }
