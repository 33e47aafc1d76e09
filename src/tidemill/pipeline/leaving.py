"""Gives partitions up cleanly: some of them at a rebalance, all of them when the engine stops.

At a rebalance, `core.pipeline.handover` decides which work is dropped and which is finished. The engine's other
partitions continue; the source waits inside the rebalance callback and carries out commits meanwhile.

A revoke and a shutdown each have one deadline for all steps. A revoke has the revoke timeout plus, with transactions,
the time for the last one. A shutdown has the drain timeout plus `END_SECONDS`, counted from the request to stop, no
matter which services are
unreachable; steps that miss the deadline are abandoned when the process exits. Messages that are not finished or not
committed are redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.services import Services
from tidemill.runtime.loop.deadline import Deadline
from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.sources.base import Source, TopicPartition, name_partition

#: Time after the drain timeout. The driver needs the rest of its 5 s to stop Spark.
END_SECONDS = 2.0
#: The share of this time reserved for closing sinks and leaving the group, even if commits use up the rest.
CLOSE_SECONDS = 0.8
#: How long hooks may take to end after they are cancelled.
HOOK_SECONDS = 1.0
#: Hooks that have not returned for this long are named when the drain timeout expires.
UNRETURNED_SECONDS = 1.0
#: The minimum time of each step, even after the deadline.
LATE_SECONDS = 0.3


async def hand_over(
    context: EngineContext, intake: Intake, partitions: Sequence[TopicPartition]
) -> Mapping[TopicPartition, int]:
    """Drop the unstarted work of revoked partitions, finish the running tasks, and give the partitions up.

    Returns:
        The offsets to commit.
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
        intake: The engine's partitions.
        source: The source of an engine's messages.
        services: The services of the handler.
        warden: Cleans up after this process if it is killed.
        is_failed: Returns whether the engine has failed, which can also happen during the shutdown.
        subscribed: Whether the engine joined its group.
        keep_membership: Whether it stays a member, because another engine takes over its partitions.
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
        keep_membership: bool = False,
    ) -> None:
        """Start the deadline."""
        self._context = context
        self._intake = intake
        self._source = source
        self._services = services
        self._warden = warden
        self._is_failed = is_failed
        self._subscribed = subscribed
        self._keep_membership = keep_membership
        self._deadline = Deadline(context.settings.executor.drain_timeout_seconds + END_SECONDS)
        self._drain_deadline = self._deadline.before(END_SECONDS)

    @property
    def _in_group(self) -> bool:
        return self._subscribed and not self._is_failed()

    async def run(self) -> None:
        """Drain unless the engine failed; then release everything, even if steps fail."""
        context = self._context
        await self._try("periodic hooks", self._services.stop_periodic())
        if self._in_group:
            await self._try("drain", self._drain())
        self._intake.close()
        if context.brake is not None:
            context.brake.close()
        # The last commit need not wait for the kill of hooks and tasks.
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
            leave = not self._is_failed() and not self._keep_membership
            await self._try("consumer", self._source.close(leave=leave, seconds=seconds))

    async def _try(self, what: str, step: Awaitable[None]) -> None:
        try:
            async with self._deadline.limit(least_seconds=LATE_SECONDS):
                await step
        except TimeoutError:
            self._context.log.warning("a step of the shutdown timed out and is abandoned", step=what)
        except Exception:
            self._context.log.exception("a step of the shutdown failed", step=what)

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
                "the drain timeout has expired; unfinished messages will be redelivered",
                messages=left,
                **({"hooks": unreturned} if unreturned else {}),
            )
        await self._context.outbox.flush(self._drain_deadline.left_seconds)

    async def _end_work(self) -> None:
        try:
            async with self._deadline.before(CLOSE_SECONDS).limit(HOOK_SECONDS, least_seconds=LATE_SECONDS / 3):
                await self._context.hooks.close()
        except TimeoutError:
            self._context.log.warning("cancelled hooks did not end in time and are abandoned")
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
                reason=self._source.describe_wait() or "no answer from the brokers",
            )
        context.commits.close()

    async def _tell_handler(self) -> None:
        if self._intake.partitions:
            async with self._deadline.before(CLOSE_SECONDS).limit(least_seconds=LATE_SECONDS):
                await self._context.call_partition_hook("on_revoke", list(self._intake.partitions))
