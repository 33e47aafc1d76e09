"""What remains to be done and said when the engines of a live run have ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import FencedError, RemoteError
from tidemill.core.supervision.slot_events import Ending
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.runtime.identity import Identity
from tidemill.sources.membership import find_present_members, reap_member
from tidemill.spark.live.jobs import make_engine_error
from tidemill.spark.progress import PipelineProgress

log = structlog.get_logger(__name__)


def refuse_failure(finished: RunFinished, settings: Settings, worker: str) -> None:
    """Raise why a run ended, unless it was drained.

    Raises:
        FencedError: Another process took the place of an engine in the group.
        HandlerError: The handler failed.
        RemoteError: An engine was lost, or killed after its drain timeout.
    """
    if finished.ending in (Ending.DRAINED, Ending.ABSENT):
        return
    if finished.ending is Ending.FENCED:
        raise FencedError(
            f"another process uses worker name {worker!r} in consumer group "
            f"{settings.kafka.consumer_group!r}; give one of them another name: "
            f"{settings.worker_name_env}=..."
        )
    if finished.ending is Ending.OVERDUE:
        raise RemoteError(
            f"slot {finished.slot} had {finished.error} and was killed; what it had not committed will be "
            "reprocessed by the next run (if a hook held up its event loop, the log names it)"
        )
    if finished.ending is Ending.CRASHED:
        raise RemoteError(f"the engine of slot {finished.slot} was lost: {finished.error}; {_advise(finished)}")
    raise make_engine_error(f"the engine of slot {finished.slot}", finished.error or finished.ending.value)


def lag_fields(progress: PipelineProgress) -> dict[str, int | None]:
    """Return the lag as fields of a log line: null as long as no engine knows one, which is not 0."""
    unknown = len(set(progress.partitions) - progress.lag.keys())
    fields: dict[str, int | None] = {"lag": sum(progress.lag.values()) if progress.lag else None}
    return fields | {"partitions_without_lag": unknown} if unknown else fields


def _advise(finished: RunFinished) -> str:
    if "Cannot run program" in (finished.error or ""):
        return "check that this user may execute that program and enter every folder above it"
    return "check how much memory this host has left, and the native libraries that the handler loads"


def refuse_uncommitted(done: PipelineProgress) -> None:
    """Refuse to call a drain clean whose commits failed.

    Raises:
        RemoteError: Finished messages are not committed.
    """
    if done.uncommitted:
        why = done.stalled.get("kafka") or "no answer from the brokers"
        raise RemoteError(
            f"commits failed at the stop: {done.uncommitted:,} finished messages are not committed and will be "
            f"reprocessed by the next run ({why})"
        )


def leave_for(settings: Settings, worker: str, slots: list[int], seconds: float) -> None:
    """Leave the consumer group on behalf of engines that could not, so that others get their partitions at once.

    An engine that died did not leave, and one that was drained while the group was joining may not have been able
    to; the brokers know.
    """
    members = {Identity(worker, slot, "", settings.kafka.consumer_group).instance_id for slot in slots}
    try:
        left_behind = find_present_members(settings, members, min(5.0, seconds)) if members else set()
    except Exception as error:
        log.warning("cannot find out which members are left in the group", error=str(error))
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
    """Log what a drained pipeline did, and whether something is left."""
    left = "; what did not finish in time is redelivered to the next run" if done.in_flight else ""
    (log.warning if left else log.info)(
        f"the pipeline is drained{left}",
        messages_done=done.messages_done,
        **lag_fields(done),
        in_flight=done.in_flight,
        dead_lettered=done.dead_lettered,
        letters_dropped=done.letters_dropped,
    )
