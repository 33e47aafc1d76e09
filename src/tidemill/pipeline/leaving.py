"""Gives partitions up in good order: some of them at a rebalance, all of them when the engine stops.

At a rebalance, `core.pipeline.handover` decides what of a partition is dropped and what is waited for; the engine's
other partitions go on, and the source waits within the rebalance callback and meanwhile commits what it is told.

Both have one deadline for all their steps. That of a revoke is the revoke timeout and, with transactions, the time for
the last one. That of a stop is the drain timeout and `END_SECONDS`, counted from the request to stop, whatever is
unreachable by then: what does not end in time is left to the end of the process. What is not finished or not committed
is redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.services import Services
from tidemill.runtime.deadline import Deadline
from tidemill.runtime.kept_warden import KeptWarden
from tidemill.sources.base import Source, TopicPartition, name_partition

#: Beyond the drain timeout. The driver needs the rest of 5 s to end Spark.
END_SECONDS = 2.0
#: Of that, what closing sinks and leaving the group may take when commits took all the time before.
CLOSE_SECONDS = 0.8
#: Hooks may take this long to end once they are cancelled.
HOOK_SECONDS = 1.0
#: Hooks that have not returned for this long are named at the end of the drain timeout.
UNRETURNED_SECONDS = 1.0
#: A step that comes too late still gets this long.
LATE_SECONDS = 0.3


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
        partitions=[name_partition(partition) for partition in partitions],
        messages_finishing=sum(owned.finishing for owned in revoked),
        messages_left_to_the_next_owner=sum(owned.unresolved - owned.finishing for owned in revoked),
    )
    context.record_partitions("revoked", partitions)
    seconds, last_seconds = context.settings.revoke_timeout_seconds, context.mode.last_commit_seconds
    deadline = Deadline(seconds + last_seconds)
    try:
        async with deadline.before(last_seconds).limit():
            for owned in revoked:
                await owned.finish()
    except TimeoutError:
        context.log.warning(
            f"tasks of revoked partitions did not finish within {seconds:g} s (kafka.revoke_timeout_seconds); "
            "their messages are redelivered to the next owner",
            messages=sum(owned.finishing for owned in revoked),
        )
    offsets = await context.mode.surrender(context.commits, [owned.partition for owned in revoked], deadline)
    for owned in revoked:
        intake.forget(owned)
    context.hooks.submit(context.call_partition_hook, "on_revoke", partitions)
    return offsets


class Stopping:
    """One stop of one engine.

    Args:
        context: The engine's parts.
        intake: Its partitions.
        source: Where its messages come from.
        services: What its handler is offered.
        warden: Cleans up after this process if it is killed.
        subscribed: Whether the engine became a member of its group.
        keep_place: Whether it stays one, for another engine that takes its partitions over.
        is_failed: Tells whether the engine has failed, which it may even while it stops.
    """

    def __init__(
        self,
        context: EngineContext,
        intake: Intake,
        source: Source,
        services: Services,
        warden: KeptWarden | None,
        is_failed: Callable[[], bool],
        *,
        subscribed: bool,
        keep_place: bool = False,
    ) -> None:
        """Begin to count the time."""
        self._context = context
        self._intake = intake
        self._source = source
        self._services = services
        self._warden = warden
        self._is_failed = is_failed
        self._subscribed = subscribed
        self._keep_place = keep_place
        self._deadline = Deadline(context.settings.executor.drain_timeout_seconds + END_SECONDS)
        self._drain_deadline = self._deadline.before(END_SECONDS)

    @property
    def _in_group(self) -> bool:
        return self._subscribed and not self._is_failed()

    async def run(self) -> None:
        """Drain unless the end is a failure; then release everything, whatever goes wrong on the way."""
        context = self._context
        await self._try("periodic hooks", self._services.stop_periodic())
        if self._in_group:
            await self._try("drain", self._drain())
        self._intake.close()
        if context.brake is not None:
            context.brake.close()
        # What was committed does not wait for what is killed.
        await asyncio.gather(
            self._try("hooks and tasks", self._end_work()),
            self._try("last commit", self._commit_last()) if self._in_group else asyncio.sleep(0),
        )
        if self._in_group:
            await self._try("on_revoke", self._tell_handler())
        await self._try("services", self._services.close())
        await asyncio.gather(
            self._try("sinks", context.outbox.close()),
            self._try("dead letters", context.letters.close()),
            self._try("report", context.finished.close()) if context.finished is not None else asyncio.sleep(0),
        )
        if self._warden is not None:
            self._warden.close()
        if self._subscribed:
            seconds = max(LATE_SECONDS, self._deadline.left_seconds) - LATE_SECONDS / 3
            leave = not self._is_failed() and not self._keep_place
            await self._try("consumer", self._source.close(leave=leave, seconds=seconds))

    async def _try(self, what: str, step: Awaitable[None]) -> None:
        try:
            async with self._deadline.limit(least_seconds=LATE_SECONDS):
                await step
        except TimeoutError:
            self._context.log.warning("a step of the stop did not end in time and is abandoned", step=what)
        except Exception:
            self._context.log.exception("a step of the stop failed", step=what)

    async def _drain(self) -> None:
        self._intake.stop()
        self._source.stop_fetching()
        try:
            async with self._drain_deadline.limit():
                await self._intake.wait_until_idle()
        except TimeoutError:
            left = sum(owned.unresolved for owned in self._intake.partitions.values())
            unreturned = self._context.hooks.calls.find_unreturned(UNRETURNED_SECONDS)
            self._context.log.warning(
                "the drain timeout is over; what is left is redelivered",
                messages=left,
                **({"hooks": unreturned} if unreturned else {}),
            )
        await self._context.outbox.flush(self._drain_deadline.left_seconds)

    async def _end_work(self) -> None:
        try:
            async with self._deadline.before(CLOSE_SECONDS).limit(HOOK_SECONDS, least_seconds=LATE_SECONDS / 3):
                await self._context.hooks.close()
        except TimeoutError:
            self._context.log.warning("hooks did not end when they were cancelled, and are abandoned")
        seconds = self._deadline.before(CLOSE_SECONDS).left_seconds
        await self._context.pool.close(min(self._context.settings.executor.term_grace_seconds, seconds))

    async def _commit_last(self) -> None:
        context = self._context
        try:
            async with self._deadline.before(CLOSE_SECONDS).limit():
                await context.commits.finish()
        except TimeoutError:
            failed = context.commits.give_up()
            context.log.warning(
                "the last commits failed; finished messages will be reprocessed",
                messages=failed,
                reason=self._source.describe_stall() or "no answer from the brokers",
            )
        context.commits.close()

    async def _tell_handler(self) -> None:
        if self._intake.partitions:
            async with self._deadline.before(CLOSE_SECONDS).limit(least_seconds=LATE_SECONDS):
                await self._context.call_partition_hook("on_revoke", list(self._intake.partitions))
