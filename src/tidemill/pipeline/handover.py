"""Giving partitions up in good order, while the engine's other partitions go on.

What of a partition is dropped and what is waited for is decided by `core.pipeline.handover`. The source waits for this
within the rebalance callback, and meanwhile commits what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.partition import call_partition_hook
from tidemill.sources.base import TopicPartition, name_of


async def hand_over(
    context: EngineContext, intake: Intake, partitions: Sequence[TopicPartition]
) -> Mapping[TopicPartition, int]:
    """Drop what has not started of revoked partitions, finish what runs, and give them up.

    Returns:
        What is to be committed of them.
    """
    revoked = [intake.partitions[partition] for partition in partitions if partition in intake.partitions]
    for owned in revoked:
        intake.hand_over(owned)
    context.log.info(
        "partitions revoked",
        partitions=[name_of(partition) for partition in partitions],
        messages_finishing=sum(owned.finishing for owned in revoked),
        messages_left_to_the_next_owner=sum(owned.unresolved - owned.finishing for owned in revoked),
    )
    seconds = context.settings.revoke_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            for owned in revoked:
                await owned.finish()
    except TimeoutError:
        context.log.warning(
            f"tasks of revoked partitions did not finish within {seconds:g} s (kafka.revoke_timeout_seconds); "
            "their messages are redelivered to the next owner",
            messages=sum(owned.finishing for owned in revoked),
        )
    offsets = await context.mode.surrender(context.commits, [owned.partition for owned in revoked])
    for owned in revoked:
        intake.forget(owned)
    context.hooks.submit(call_partition_hook, context, "on_revoke", partitions)
    return offsets
