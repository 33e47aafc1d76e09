"""The parts of an engine that its partitions and windows share.

Everything here is below partitions and windows and names neither; they reach the parts above them through two
callables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tidemill.config.settings import Settings
from tidemill.core.pipeline.backpressure import Backpressure
from tidemill.core.retry import Backoff
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.brake import EngineBrake
from tidemill.pipeline.checks import check_collect_result
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.delivery.delivery import ResultDelivery
from tidemill.pipeline.delivery.modes import DeliveryMode
from tidemill.pipeline.delivery.routing import RoutedPayload
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.hooks import HookRunner, call_hook, check_returned
from tidemill.pipeline.reports.collector import FinishedMessages
from tidemill.pipeline.reports.counters import Counters, Overridden, Slowest
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.runtime.kafka.source_message import MessageSpan
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import TopicPartition, name_partitions

if TYPE_CHECKING:  # imported lazily: only engines that record load it
    from tidemill.pipeline.recording.recorder import EngineRecorder

#: Warnings of the same kind are logged once in this many seconds.
WARN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The shared parts of one engine.

    Attributes:
        settings: The validated configuration.
        handler: The user's handler.
        overridden: Which hooks the handler defines.
        hooks: Runs hooks.
        pool: Runs tasks.
        outbox: Delivers results.
        mode: How results are delivered: at least once or exactly once.
        letters: Writes dead letters.
        commits: The ledger and its commits.
        load: How much each partition has in flight, against its share.
        brake: Holds failures when there are too many; None: no brake is configured.
        counters: Counters for reports.
        slowest: The slowest tasks.
        recorder: The flight recorder; None: recording is off.
        finished: Collects messages that left the pipeline, for reports; None: there are no reports.
        backoff: The delays between the attempts of a task.
        log: The engine's logger.
        holds_windows: Whether the messages of a window are resolved only together, after the window's hook.
        room_freed: Called with a partition that may take more messages than before.
        became_idle: Called when a partition has no more work in flight.
    """

    settings: Settings
    handler: Handler[Any, Any]
    overridden: Overridden
    hooks: HookRunner
    pool: TaskPool
    outbox: ResultDelivery
    mode: DeliveryMode
    letters: DeadLetters
    commits: Commits
    load: Backpressure[TopicPartition]
    brake: EngineBrake | None
    counters: Counters
    slowest: Slowest
    recorder: EngineRecorder | None
    finished: FinishedMessages | None
    backoff: Backoff
    log: Any
    holds_windows: bool
    room_freed: Callable[[TopicPartition], None]
    became_idle: Callable[[], None]

    def route(self, value: Any) -> list[RoutedPayload]:
        """Resolve the sinks of a hook's result.

        Raises:
            TypeError: The hook returned neither a CollectResult nor None.
            ConfigError: A sink is ambiguous or unknown; nothing was delivered.
            HandlerError: Code of the user's own classes raised a `BaseException` that is not an `Exception`.
        """
        return check_returned(self._route, value)

    def _route(self, value: Any) -> list[RoutedPayload]:
        collect = check_collect_result(value)
        return [] if collect is None else self.outbox.route(collect)

    async def call_partition_hook(self, hook: str, partitions: Sequence[TopicPartition]) -> None:
        """Call `on_assign` or `on_revoke`; errors are logged."""
        try:
            await call_hook(getattr(self.handler, hook)(partitions), self.hooks.calls, hook, _locate, partitions)
        except Exception as error:
            self.log.warning("a hook raised", hook=hook, exc_info=error)

    def record_partitions(
        self, kind: Literal["assigned", "revoked"], partitions: Sequence[TopicPartition], why: str = ""
    ) -> None:
        """Record that partitions were assigned or revoked, if recording is on."""
        if self.recorder is not None:
            self.recorder.note_partitions(kind, partitions, why)

    def warn(self, text: str, **details: object) -> None:
        """Count a harmless mistake of the handler, and log it at a limited rate."""
        self.counters.warnings += 1
        throttle(self.log, WARN_SECONDS).warning(text, **details)


def _locate(partitions: Sequence[TopicPartition]) -> MessageSpan:
    return MessageSpan(", ".join(name_partitions(partitions, 10)))
