"""Reports the message that holds up each partition of an engine, and which partitions are stalled.

`core.pipeline.standstill` decides which partitions are stalled; `message_locator` finds the stage of the message. Both
run about once a second; nothing is tracked while messages pass. If the oldest message of a partition has changed since
the last check, the partition makes progress, and its stage is not computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tidemill.core.errors import escape_surrogates
from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.core.pipeline.standstill import StandstillWatch
from tidemill.core.wording import format_count
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.inspection.message_locator import EngineSnapshot, MessageLocator
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.partition import OwnedPartition
from tidemill.runtime.link.progress import PartitionHead
from tidemill.sources.base import Source, TopicPartition

CHECK_SECONDS = 1.0
#: The ledger position that represents a partition without taken messages; real positions are not negative.
_NOTHING_TAKEN = -1
#: A stage is sent whenever it changes, so its text contains no times.
_MAX_TEXT_CHARS = 500

Head = LedgerEntry[TopicPartition, int]


class StandstillReport:
    """The heads and stalls of an engine's partitions.

    Args:
        context: The engine's parts.
        intake: The engine's partitions.
        source: The source of an engine's messages.
        locator: Finds the stage of a message.
        clock: The loop's clock.
    """

    def __init__(
        self,
        context: EngineContext,
        intake: Intake,
        source: Source,
        locator: MessageLocator,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._intake = intake
        self._source = source
        self._locator = locator
        self._clock = clock
        self._watch: StandstillWatch[TopicPartition] = StandstillWatch(context.settings.executor.stall_seconds)
        self._due = 0.0
        self._found: dict[str, str] = {}
        self._heads: Mapping[str, PartitionHead] = {}

    def describe(self) -> Mapping[str, str]:
        """Return why each stalled partition is stalled, by its name; checks again after a second."""
        self._look()
        return self._found

    def list_heads(self) -> Mapping[str, PartitionHead]:
        """Return the oldest message of each partition with work, by partition name; each check makes a new mapping."""
        self._look()
        return self._heads

    def _look(self) -> None:
        now = self._clock()
        if now >= self._due:
            self._due = now + CHECK_SECONDS
            self._check(now)

    def _check(self, now: float) -> None:
        context, partitions = self._context, self._intake.partitions
        heads = {at: entry for at, entry in context.commits.list_heads().items() if at in partitions}
        positions = {partition: entry.position for partition, entry in heads.items()}
        idle: list[TopicPartition] = []
        for partition, owned in partitions.items():
            if partition in positions or owned.handover is not None or not self._source.buffered(partition):
                continue
            if self._intake.is_paused(partition):  # a partition that a user paused is not stalled
                idle.append(partition)
            else:
                positions[partition] = _NOTHING_TAKEN
        found = self._watch.check(now, positions)
        look, behind = self._locator.look(now), time.time() - now
        stages = {
            partition: self._find_stage(look, partitions[partition], heads.get(partition))
            for partition, since in found.heads.items()
            if since < now
        }
        since = {**dict.fromkeys(idle, now), **found.heads}
        stages |= {partition: look.find_buffered_stage(partitions[partition]) for partition in idle}
        self._heads = {
            partitions[partition].name: self._describe_head(
                partitions[partition], heads.get(partition), since[partition] + behind, stages.get(partition)
            )
            for partition in since
        }
        self._found = {
            partitions[partition].name: self._describe_stall(
                partitions[partition], heads.get(partition), now - at, stages[partition]
            )
            for partition, at in found.since.items()
        }
        for partition in found.begun:
            name = partitions[partition].name
            context.log.warning("a partition is stalled", partition=name, why=self._found[name])
            if context.recorder is not None:
                entry = heads.get(partition)
                context.recorder.note_stall(partition, entry.item if entry is not None else None, self._found[name])
        for partition in found.over:
            if partition in partitions:
                context.log.info("a partition makes progress again", partition=partitions[partition].name)

    @staticmethod
    def _find_stage(look: EngineSnapshot, owned: OwnedPartition, head: Head | None) -> MessageStage:
        return look.find_buffered_stage(owned) if head is None else look.find_stage(owned, head)

    def _describe_stall(self, owned: OwnedPartition, head: Head | None, seconds: float, stage: MessageStage) -> str:
        if head is None:
            count = format_count(self._source.buffered(owned.partition), "message")
            what = f"{count} buffered: {stage.why}"
        else:
            what = f"offset {head.item}: {stage.describe()}"
        return escape_surrogates(f"nothing was committed for {seconds:.0f} s; {what}")

    def _describe_head(
        self, owned: OwnedPartition, head: Head | None, since: float, stage: MessageStage | None
    ) -> PartitionHead:
        first = self._source.peek(owned.partition)
        if head is not None:
            offset, written_ms = head.item, owned.taken.find(head.item)
        else:
            offset = first.offset if first is not None else -1
            written_ms = first.timestamp if first is not None and first.timestamp >= 0 else None
        # Keep the time that was reported before, because the two clocks drift.
        before = self._heads.get(owned.name)
        if before is not None and before.offset == offset:
            since = before.since
        return PartitionHead(
            offset,
            round(since, 3),
            None if written_ms is None else written_ms / 1000,
            stage.stage.value if stage is not None else "",
            escape_surrogates(stage.summarize())[:_MAX_TEXT_CHARS] if stage is not None else "",
            self._source.buffered(owned.partition),
        )
