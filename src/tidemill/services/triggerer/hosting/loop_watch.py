"""Logs which trigger blocks the event loop of a host, with the blocking line."""

from __future__ import annotations

from collections.abc import Container

import structlog

from tidemill.core.blocking import BlockCause
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.blockwatch import Block, BlockWatch
from tidemill.runtime.loop.durations import Durations

log = structlog.get_logger(__name__)


def watch_loop(threshold_seconds: float, triggers: Container[object], lags: Durations | None = None) -> BlockWatch:
    """Return a watch that logs blocks of the loop.

    Args:
        threshold_seconds: Longer blocks are logged.
        triggers: The task names that belong to triggers; read when the loop blocks.
        lags: Collects how late the loop was.
    """

    def blocking(block: Block) -> dict[str, str | None]:
        return {"trigger" if block.task in triggers else "task": block.task}

    def on_block(block: Block) -> None:
        if block.cause is BlockCause.STARVED:
            throttle(log, 10.0).warning(
                "the event loop gets no CPU time; other processes keep the machine busy",
                late_seconds=round(block.seconds, 3),
            )
            return
        log.warning(
            "a trigger blocks the event loop; all triggers wait for it"
            if block.task in triggers
            else "the event loop is blocked; all triggers wait",
            **blocking(block),
            cause=block.cause.value,
            seconds=round(block.seconds, 3),
            threshold_seconds=threshold_seconds,
            stack=block.stack,
        )

    def on_over(block: Block) -> None:
        if block.cause is not BlockCause.STARVED:
            log.warning("the event loop is running again", **blocking(block), blocked_seconds=round(block.seconds, 3))

    return BlockWatch(threshold_seconds, on_block, on_over, lags)
