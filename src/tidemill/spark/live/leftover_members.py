"""Leaves the consumer group on behalf of engines that ended without leaving."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import structlog

from tidemill.config.settings import Settings
from tidemill.runtime.identity import Identity
from tidemill.sources.membership import find_present_members, reap_member

log = structlog.get_logger(__name__)


def leave_group_for(settings: Settings, worker: str, slots: list[int], seconds: float) -> None:
    """Leave the consumer group on behalf of engines that could not, so that others get their partitions at once.

    An engine that died did not leave, and one that was drained while the group was joining may not have been able
    to; the brokers know.
    """
    members = {Identity(worker, slot, "", settings.kafka.consumer_group).instance_id for slot in slots}
    try:
        left_behind = find_present_members(settings, members, min(5.0, seconds)) if members else set()
    except Exception as error:
        log.warning("the brokers do not say who is left in the group", error=str(error))
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
