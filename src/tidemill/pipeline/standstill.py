"""Names the partitions of an engine that stand still, with the message that holds each up and what that waits for.

`core.pipeline.standstill` decides which ones do. Where such a message is, is looked up about once a second; nothing is
noted while messages pass.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

from tidemill.core.errors import escape_surrogates
from tidemill.core.pipeline.standstill import StandstillWatch
from tidemill.core.wording import format_count
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.tasks.pool import TaskRun
from tidemill.pipeline.windows.window import WindowRun
from tidemill.sources.base import Source, TopicPartition

CHECK_SECONDS = 1.0
#: What identifies the head of a partition of which nothing was taken: no position in the ledger is negative.
_NOTHING_TAKEN = -1
_MAX_TASK_CHARS = 100


class StandstillReport:
    """The partitions of an engine that stand still.

    Args:
        context: The engine's parts.
        intake: Its partitions.
        source: Where messages come from.
        describe_waits: Returns what the engine waits for outside, by name.
        clock: The loop's clock.
    """

    def __init__(
        self,
        context: EngineContext,
        intake: Intake,
        source: Source,
        describe_waits: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start before the first check."""
        self._context = context
        self._intake = intake
        self._source = source
        self._describe_waits = describe_waits
        self._clock = clock
        self._watch: StandstillWatch[TopicPartition] = StandstillWatch(context.settings.executor.stall_seconds)
        self._due = 0.0
        self._found: dict[str, str] = {}

    def describe(self) -> Mapping[str, str]:
        """Return what holds up each partition that stands still, by its name; looks again after a second."""
        now = self._clock()
        if now >= self._due:
            self._due = now + CHECK_SECONDS
            self._found = self._check(now)
        return self._found

    def _check(self, now: float) -> dict[str, str]:
        context, partitions = self._context, self._intake.partitions
        heads = context.commits.list_heads()
        positions = {partition: entry.position for partition, entry in heads.items() if partition in partitions}
        for partition, owned in partitions.items():
            if partition in positions or self._intake.is_paused(partition):
                continue
            if owned.handover is None and self._source.buffered(partition):
                positions[partition] = _NOTHING_TAKEN
        found = self._watch.check(now, positions)
        texts = {}
        for partition, since in found.since.items():
            owned, entry = partitions[partition], heads.get(partition)
            if entry is None:
                stage = (
                    f"{format_count(self._source.buffered(partition), 'message')} buffered: {self._find_why_buffered()}"
                )
            else:
                stage = f"offset {entry.item}: {self._find_stage(owned, entry.item, entry.resolved, now)}"
            text = f"nothing was committed for {now - since:.0f} s; {stage}"
            texts[owned.name] = escape_surrogates(text)
        for partition in found.begun:
            name = partitions[partition].name
            context.log.warning("a partition stands still", partition=name, why=texts[name])
            if context.recorder is not None:
                entry = heads.get(partition)
                context.recorder.note_stall(partition, entry.item if entry is not None else None, texts[name])
        for partition in found.over:
            if partition in partitions:
                context.log.info("a partition makes progress again", partition=partitions[partition].name)
        return texts

    def _find_why_buffered(self) -> str:
        brake = self._context.brake
        if brake is not None and (text := brake.describe_stall()) is not None:
            return f"the brake is on ({text})"
        return "the engine has no room for them"

    def _find_stage(self, owned: OwnedPartition, offset: int, resolved: bool, now: float) -> str:
        if resolved:
            waits = self._describe_waits()
            what = "its commit is not confirmed"
            if self._context.mode.cut is not None:
                what = "its transaction is not committed"
            return f"{what} ({waits['kafka']})" if "kafka" in waits else what
        if offset in owned.held:
            return "held by the failure brake"
        calls = self._context.hooks.calls.find_unreturned(0.0)
        hooks = [
            f"{key.removesuffix(f' of {owned.name}')} {text}" for key, text in calls.items() if key.endswith(owned.name)
        ]
        if (stage := self._intake.describe_unarranged(owned.partition, offset)) is not None:
            return next((text for text in hooks if text.startswith("arrange ")), stage)
        run = _find_run(owned, offset)
        if run is not None and (stage := self._find_task_stage(owned, run, now)) is not None:
            return stage
        if hooks:
            return f"hook {hooks[0]}"
        return self._find_delivery_stage(owned)

    def _find_task_stage(self, owned: OwnedPartition, run: TaskRun, now: float) -> str | None:
        """Return what a task waits for; None: it has ended, and a hook is to say what comes of it."""
        name = f"task {run.task.task_id[:_MAX_TASK_CHARS]}"
        if run.process is not None:
            pid, started_at = getattr(run.process, "pid", None), getattr(run.process, "started_at", 0.0)
            if not started_at:
                return f"{name} waits for a resident program"
            return f"{name} has been running for {now - started_at:.0f} s" + (f" (process {pid})" if pid else "")
        if run.timer is not None:
            most = self._context.settings.executor.max_retries + 1
            due = max(0.0, run.timer.when() - now)
            return f"{name} is in backoff: attempt {run.attempts} of {most} failed, the next is in {due:.0f} s"
        if run in owned.parked:
            return f"{name} waits until fewer results of its partition wait for sinks"
        if self._context.pool.is_queued(run):
            return f"{name} is queued: all executors are busy"
        if owned.order is not None and run.attempts == 0:
            return f"{name} waits for an earlier message with its key"
        return None

    def _find_delivery_stage(self, owned: OwnedPartition) -> str:
        waits = self._describe_waits()
        if text := waits.get("dead letters"):
            return f"its dead letter is not confirmed ({text})"
        sinks = [f"{name}: {text}" for name, text in sorted(waits.items()) if name.startswith("sinks.")]
        if sinks:
            return f"its results are not delivered ({'; '.join(sinks)})"
        if owned.undelivered:
            return "its results wait for their sinks"
        if self._context.holds_windows:
            return "it waits for the rest of its window"
        return "it waits for a hook or a delivery"


def _find_run(owned: OwnedPartition, offset: int) -> TaskRun | None:
    """Return the first task of a message that is not terminal."""
    for run in owned.pending.values():
        window = run.owner
        if not isinstance(window, WindowRun):
            continue
        index = bisect_left(window.messages, offset, key=lambda message: message.offset)
        if index < len(window.messages) and window.messages[index].offset == offset and run in window.runs_of[index]:
            return run
    return None
