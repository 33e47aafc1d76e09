"""The steps after the engines of a live run have ended: errors, log messages, and leaving the consumer group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import FencedError, RemoteError
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.runtime.identity import EngineIdentity
from tidemill.sources.membership import find_present_members, reap_member
from tidemill.spark.live.jobs import make_engine_error
from tidemill.spark.progress import PipelineProgress

log = structlog.get_logger(__name__)


def refuse_failure(finished: RunFinished, settings: Settings, worker: str) -> None:
    """Raise the error of a run, unless it was drained.

    Raises:
        FencedError: Another process took over an engine's membership in the group.
        HandlerError: The handler failed.
        RemoteError: An engine was lost, or killed after its drain timeout.
    """
    if finished.ending in (EngineEnding.DRAINED, EngineEnding.ABSENT):
        return
    if finished.ending is EngineEnding.FENCED:
        raise FencedError(
            f"another process uses worker name {worker!r} in consumer group "
            f"{settings.kafka.consumer_group!r}; set another name for one of them: "
            f"{settings.worker_name_env}=..."
        )
    if finished.ending is EngineEnding.OVERDUE:
        raise RemoteError(
            f"slot {finished.slot} had {finished.error} and was killed; the next run reprocesses its uncommitted "
            "messages (if a hook blocked its event loop, the log names it)"
        )
    if finished.ending is EngineEnding.CRASHED:
        raise RemoteError(f"the engine of slot {finished.slot} was lost: {finished.error}; {_advise(finished)}")
    raise make_engine_error(f"the engine of slot {finished.slot}", finished.error or finished.ending.value)


def lag_fields(progress: PipelineProgress) -> dict[str, int | None]:
    """Return the lag as fields of a log line; null, which differs from 0, while no engine knows a lag."""
    unknown = len(set(progress.partitions) - progress.lag.keys())
    fields: dict[str, int | None] = {"lag": sum(progress.lag.values()) if progress.lag else None}
    return fields | {"partitions_without_lag": unknown} if unknown else fields


def _advise(finished: RunFinished) -> str:
    if "Cannot run program" in (finished.error or ""):
        return "check that this user may execute that program and enter every folder above it"
    return "check how much memory this host has left, and the native libraries that the handler loads"


def refuse_uncommitted(done: PipelineProgress) -> None:
    """Raise an error if commits failed, so that a drain does not count as clean.

    Raises:
        RemoteError: Finished messages are not committed.
    """
    if done.uncommitted:
        why = done.waits.get("kafka") or "no response from the brokers"
        raise RemoteError(
            f"commits failed during shutdown ({why}); the next run reprocesses {done.uncommitted:,} finished messages"
        )


def leave_for(settings: Settings, worker: str, slots: list[int], seconds: float) -> None:
    """Leave the consumer group on behalf of engines that could not, so that others get their partitions at once.

    An engine that died did not leave, and an engine that was drained during a rebalance may not have been able to; the
    brokers know which members remain.
    """
    members = {EngineIdentity(worker, slot, "", settings.kafka.consumer_group).instance_id for slot in slots}
    try:
        left_behind = find_present_members(settings, members, min(5.0, seconds)) if members else set()
    except Exception as error:
        log.warning("cannot look up which members are left in the group", error=str(error))
        return

    def leave(instance_id: str) -> None:
        try:
            reap_member(settings, instance_id, seconds)
        except Exception as error:
            log.warning(
                "an engine's partitions stay reserved for the session timeout",
                member=instance_id,
                error=str(error),
                session_timeout_ms=settings.kafka.session_timeout_ms,
            )

    if left_behind:
        with ThreadPoolExecutor(len(left_behind)) as pool:
            list(pool.map(leave, left_behind))


def log_drained(done: PipelineProgress) -> None:
    """Log what a drained pipeline did, and whether work is left."""
    left = "; the next run reprocesses messages that did not finish in time" if done.in_flight else ""
    (log.warning if left else log.info)(
        f"the pipeline is drained{left}",
        messages_done=done.messages_done,
        **lag_fields(done),
        in_flight=done.in_flight,
        dead_lettered=done.dead_lettered,
        letters_dropped=done.letters_dropped,
    )
