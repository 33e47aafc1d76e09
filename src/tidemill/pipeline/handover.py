"""Giving partitions up in good order, while the engine's other partitions go on.

What of a partition is dropped and what is waited for is decided by `core.handover`. The source waits for this within
the rebalance callback, and meanwhile commits what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tidemill.pipeline.partition import OwnedPartition
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine

#: With transactions, the last one of revoked partitions may take this long.
LAST_TRANSACTION_SECONDS = 5.0


async def hand_over(engine: Engine, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
    """Drop what has not started of revoked partitions, finish what runs, and give them up.

    Returns:
        What is to be committed of them.
    """
    lanes = [engine.intake.lanes[partition] for partition in partitions if partition in engine.intake.lanes]
    for lane in lanes:
        lane.hand_over(engine.commits.unresolved(lane.partition), engine.pool.withdraw(lane))
    engine.log.info(
        "partitions revoked",
        partitions=[f"{topic}/{number}" for topic, number in partitions],
        messages_finishing=sum(_left(lane) for lane in lanes),
        messages_left_to_the_next_owner=sum(lane.unresolved - _left(lane) for lane in lanes),
    )
    seconds = engine.settings.revoke_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            for lane in lanes:
                await lane.finish()
    except TimeoutError:
        engine.log.warning(
            f"tasks of revoked partitions did not finish within {seconds:g} s (kafka.revoke_timeout_seconds); "
            "their messages are redelivered to the next owner",
            messages=sum(_left(lane) for lane in lanes),
        )
    offsets = await _surrendered(engine, [lane.partition for lane in lanes])
    for lane in lanes:
        engine.forget(lane)
    engine.hooks.submit(engine.partition_hook, "on_revoke", partitions)
    return offsets


def _left(lane: OwnedPartition) -> int:
    return lane.handover.left if lane.handover is not None else 0


async def _surrendered(engine: Engine, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
    """Return what is to be committed of partitions that go; with transactions, that is done here already."""
    if engine.outbox.stage is None:
        return engine.commits.surrender(partitions)
    try:
        async with asyncio.timeout(LAST_TRANSACTION_SECONDS):
            await engine.commits.finish(partitions)
    except TimeoutError:
        engine.log.warning("the last transaction of revoked partitions did not end; their messages are redelivered")
    return {}
