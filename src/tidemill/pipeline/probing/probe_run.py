"""One probe: a message in flight through windows, tasks and hooks, by the engine's code over separate parts.

The probe shares the handler's attributes, the routes to sinks and the settings with the engine. It has its own pool and
executor of few processes, hooks, counters, a ledger that commits nothing, and captured results.

Invariants: a probe does not change the engine's counters, rows, letters, offsets or cache. Every process that it
started has ended before `end` returns. A fault of the probe ends the probe alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from tidemill.core.errors import describe_error
from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.backpressure import Backpressure
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.checks import check_tasks
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.modes import AtLeastOnce
from tidemill.pipeline.delivery.routing import Router
from tidemill.pipeline.handler.cache import Cache
from tidemill.pipeline.handler.models import PendingContext
from tidemill.pipeline.hooks import HookRunner, begin_hook, call_hook, check_returned
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.probing.cache_view import CacheView
from tidemill.pipeline.probing.capture import CapturedDelivery, CapturedLetters, NoCommits
from tidemill.pipeline.probing.observed_handler import Stages, copy_handler
from tidemill.pipeline.reports.counters import Counters, Slowest
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.services import Offload
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows.transform import RefusedResultError, call_transform, list_refused, start_transformed
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.runtime.kafka.source_message import SourceMessage, set_field, span_messages
from tidemill.runtime.log.user_code import explain_error
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sources.base import TopicPartition

log = structlog.get_logger(__name__)

#: At most this many tasks of a probe run at once, in addition to the engine's tasks.
MAX_EXECUTORS = 4
#: How long hooks may take to end after they are cancelled.
HOOK_SECONDS = 1.0
#: The maximum time between SIGTERM and SIGKILL.
GRACE_SECONDS = 2.0


class ProbeRun:
    """One probe; used once, on the engine's loop.

    Args:
        context: The engine's parts.
        engine_id: The engine's id, by which the warden finds processes.
        router: Finds the sinks of hooks' payloads.
        message: The message to probe, not parsed.
        stop: Set when the engine stops.

    Attributes:
        stages: The calls of hooks.
        attempts: The ended attempts of each task: number, when queued, when ended (by the loop's clock), and outcome.
        window: The message's window, once it has tasks.
        delivery: The payloads that would have gone to sinks.
        letters: The dead letters that would have been written.
        cache: The cache that hooks see; None: there is none.
        fault: The failure of the probe itself; '' if there is none.
        began: When the probe started, by the loop's clock.
        pool: Runs the tasks.
    """

    def __init__(
        self,
        context: EngineContext,
        engine_id: str,
        router: Router,
        message: SourceMessage,
        stop: asyncio.Event,
    ) -> None:
        """Wire the parts; nothing runs yet."""
        limits = context.settings.executor
        self._message = message
        self._stop = stop
        self._done = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None
        self._tasks = EngineTasks(self._note_fault)
        self.began = time.monotonic()
        self.fault = ""
        self.stages = Stages()
        self.attempts: dict[TaskInFlight, list[tuple[int, float, float, ProcessOutcome]]] = {}
        self.window: WindowInFlight | None = None
        self.delivery, self.letters = CapturedDelivery(router), CapturedLetters()
        found = context.handler.__dict__.get("cache")
        self.cache = CacheView(found) if isinstance(found, Cache) else None
        self._offload = Offload(limits.offload_threads)
        self._executor = build_executor(
            limits.model_copy(update={"max_executors": min(limits.max_executors, MAX_EXECUTORS)}), engine_id
        )
        self.pool = TaskPool(self._executor, limits, self._tasks)
        self.pool.on_attempt = self._note_attempt
        load: Backpressure[TopicPartition] = Backpressure(2, 1, 1, limits.max_queued_bytes, 2, 2)
        mode = AtLeastOnce()
        self._context = replace(
            context,
            handler=copy_handler(context.handler, self.stages, self.cache, self._offload),
            hooks=HookRunner(self._tasks),
            pool=self.pool,
            outbox=self.delivery,
            mode=mode,
            letters=self.letters,
            commits=Commits(NoCommits(), lambda partition, count: None, mode),
            load=load,
            brake=None,
            counters=Counters(),
            slowest=Slowest(),
            recorder=None,
            finished=None,
            log=log.bind(probe=f"{message.topic}/{message.partition}/{message.offset}"),
            room_freed=lambda partition: None,
            became_idle=self._look_soon,
        )
        self._partition = OwnedPartition((message.topic, message.partition), self._context)
        load.assign(self._partition.partition)

    @property
    def pending(self) -> Mapping[object, TaskInFlight]:
        """The tasks that have not ended, by their keys."""
        return self._partition.pending

    @property
    def is_over(self) -> bool:
        """Whether the message has left the pipeline, and its window's own hook has run."""
        return self._done.is_set() and not self.fault

    # -- steps ------------------------------------------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Run until the message has left the pipeline, the time is over, or the engine stops."""
        self._executor.open()
        self._context.hooks.submit(self._begin)
        waits = {asyncio.ensure_future(self._done.wait()), asyncio.ensure_future(self._stop.wait())}
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self) -> asyncio.Future[None] | None:
        """Stop everything that still runs; return a future for hooks that have not ended, None if there are none."""
        self._partition.close()
        self._offload.close()
        self._context.commits.close()
        closing = asyncio.ensure_future(self._context.hooks.close())
        await asyncio.wait({closing}, timeout=HOOK_SECONDS)
        await self.pool.close(min(self._context.settings.executor.term_grace_seconds, GRACE_SECONDS))
        if closing.done():
            self._tasks.close()
            return None
        return closing

    async def _begin(self) -> None:
        message, partition, context = self._message, self._partition, self._context
        partition.take([message], message.size_bytes)
        entry = context.commits.open(partition.partition, message.offset)
        if not self._parse(entry):
            return
        started_at, arrived = time.time_ns() // 1000, time.monotonic()
        if context.overridden.transform:
            await self._transform(entry, started_at, arrived)
            return
        try:
            hook = begin_hook(context.handler.arrange, [message], PendingContext(partition.list_pending_tasks))
            returned = await call_hook(hook, context.hooks.calls, "arrange", span_messages, [message])
            tasks = check_returned(check_tasks, "arrange", returned)
        except Exception as error:
            partition.reject(message, entry, LetterKind.ARRANGE, explain_error(error, "arrange"))
            return
        if partition.closed:
            return
        self._make_window(entry, started_at, arrived).start(tasks, None)

    def _make_window(self, entry: LedgerEntry[TopicPartition, int], started_at: int, arrived: float) -> WindowInFlight:
        times = WindowTimes(1, started_at, time.time_ns() // 1000)
        self.window = WindowInFlight(self._context, self._partition, [self._message], [entry], arrived, times)
        return self.window

    async def _transform(self, entry: LedgerEntry[TopicPartition, int], started_at: int, arrived: float) -> None:
        message, partition = self._message, self._partition
        try:
            result = await call_transform(self._context, [message])
        except Exception as error:
            raised = error.error if isinstance(error, RefusedResultError) else error
            text = explain_error(raised, "transform")
            partition.reject(message, entry, LetterKind.TRANSFORM, text, list_refused(error))
            return
        if not partition.closed:
            start_transformed(self._make_window(entry, started_at, arrived), result, None)

    def _parse(self, entry: LedgerEntry[TopicPartition, int]) -> bool:
        """Set the payload, as the intake does; return whether the message continues."""
        message, partition, context = self._message, self._partition, self._context
        if message.value is None:
            if context.handler.accept_tombstones:
                return True
            partition.reject(message, entry, LetterKind.TOMBSTONE, "the handler does not accept tombstones")
            return False
        try:
            set_field(message, "payload", context.handler.deserialize_message(message))
        except BaseException as error:  # any exception of the hook concerns this message alone
            if context.settings.kafka.on_parse_error == "pass":
                set_field(message, "parse_error", describe_error(error))
                return True
            partition.reject(message, entry, LetterKind.PARSE, explain_error(error, "deserialize_message"))
            return False
        return True

    # -- observations -----------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        # Later, because a message may leave in the same turn before its window's own hook is submitted.
        asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        if not self._partition.busy:
            self._done.set()

    def _note_fault(self, text: str) -> None:
        self.fault = text
        self._done.set()

    def _note_attempt(self, run: TaskInFlight, outcome: ProcessOutcome) -> None:
        now = time.monotonic()
        self.attempts.setdefault(run, []).append((run.attempts, run.queued_at, now, outcome))

    def list_tasks(self) -> list[TaskInFlight]:
        """Return the tasks, including replacements, in the order of their creation."""
        return self.window.flights_of[0] if self.window is not None else []
