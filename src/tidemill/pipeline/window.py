"""One window on its way: arrange, tasks, hooks, deliveries, until every message of it is resolved.

`core.arrangement` decides when a message and the window are complete and when a message is resolved; this shell calls
the hooks, hands what they return to the outbox, and turns every failure into a dead letter. Whatever happens after the
partition was given up changes nothing.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.arrangement import Arrangement, Effect, MessageComplete, MessageResolved
from tidemill.core.retry import Retry, decide
from tidemill.pipeline import failures
from tidemill.pipeline.checks import check_action, check_tasks
from tidemill.pipeline.delivery.routing import Origin, Routed
from tidemill.pipeline.handler.models import (
    ErrorAction,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    MessageGroup,
    PendingContext,
)
from tidemill.pipeline.hooks import call_hook
from tidemill.pipeline.reports.failure_log import hook_raised
from tidemill.pipeline.tasks.pool import TaskRun
from tidemill.runtime.messages import SourceMessage, place_of
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine
    from tidemill.pipeline.partition import OwnedPartition

log = structlog.get_logger(__name__)


class WindowRun:
    """A window of messages of one partition, in hand.

    Args:
        engine: The services it uses.
        lane: Its partition.
        messages: Its messages, in order.
        entries: Their entries in the ledger.
        arrived: The loop's time when its first message came.
        is_parsed: Whether its messages were; else it has one, which is parsed before `arrange`.

    Attributes:
        causes: What failed of its messages, by index, if there is a brake.
        place: What keeps its place in the order of its key until it is arranged.
    """

    __slots__ = (
        "arrived",
        "causes",
        "engine",
        "entries",
        "graph",
        "held_for_window",
        "is_parsed",
        "lane",
        "messages",
        "place",
        "results",
        "runs_of",
        "started_at",
    )

    def __init__(
        self,
        engine: Engine,
        lane: OwnedPartition,
        messages: list[SourceMessage],
        entries: Sequence[LedgerEntry[TopicPartition, int]],
        arrived: float,
        *,
        is_parsed: bool = True,
    ) -> None:
        """Prepare; nothing runs before `arrange`."""
        self.engine = engine
        self.lane = lane
        self.messages = messages
        self.entries = entries
        self.arrived = arrived
        self.graph = Arrangement(len(messages))
        self.runs_of: list[list[TaskRun]] = [[] for _ in messages]
        self.results: list[ExecutorResult | ExecutorError] = []
        self.started_at = 0.0
        self.held_for_window = False
        self.is_parsed = is_parsed
        self.causes: dict[int, str] = {}
        self.place: TaskRun | None = None

    # -- arrange ----------------------------------------------------------------------------------------------

    async def arrange(self) -> None:
        """Ask the handler for tasks; when it raises, find the message that it cannot take."""
        engine, lane = self.engine, self.lane
        if not self.is_parsed and not failures.parsed(self):
            return
        self.started_at = time.time()
        try:
            # A copy, here and below: what the handler does to its list must not change ours.
            hook = engine.handler.arrange(list(self.messages), PendingContext(lane.pending_tasks))
            returned = await call_hook(hook, engine.hooks.calls, "arrange", self._place)
            tasks = check_tasks("arrange", returned)
        except Exception as error:
            if not lane.closed and lane.handover is None:
                failures.arrange_failed(self, error)
        else:
            if not lane.closed and lane.handover is None:
                self._start(tasks)

    def _start(self, tasks: list[ExecutorTask]) -> None:
        if self.engine.holds_windows:
            self.held_for_window = True
            self.graph.hold(range(len(self.messages)))
        places = {message.offset: index for index, message in enumerate(self.messages)} if tasks else {}
        runs: list[tuple[TaskRun, Sequence[int]]] = []
        for task in tasks:
            indexes = self._indexes(task, places)
            run = self._run_for(task)
            for index in indexes or range(len(self.messages)):
                self.runs_of[index].append(run)
            runs.append((run, indexes))
        effects = self.graph.arranged(runs)
        if self.lane.order is None:
            for run, _ in runs:
                self.launch(run)
        else:
            self.lane.order.arranged(self, runs)
        self._apply(effects)

    def _indexes(self, task: ExecutorTask, places: dict[int, int]) -> Sequence[int]:
        """Return the messages a task works for; () means all of the window."""
        offsets = task.source_offsets
        if not offsets:
            return ()
        try:
            if len(offsets) == 1:
                return (places[offsets[0]],)
            return sorted({places[offset] for offset in offsets})
        except KeyError:
            own = sorted({places[offset] for offset in offsets if offset in places})
            self.engine.warn(
                "source_offsets of a task lie outside its window and are ignored",
                task_id=task.task_id,
                partition=self.lane.name,
                ignored=sorted(set(offsets) - set(places))[:10],
            )
            return own

    def _run_for(self, task: ExecutorTask) -> TaskRun:
        run = TaskRun(task, self, self.arrived)
        if task.task_id in self.lane.pending:
            self.engine.warn(
                "a task with this id is pending already; it runs under an internal key",
                task_id=task.task_id,
                partition=self.lane.name,
            )
            run.key = run
        self.lane.pending[run.key] = run
        return run

    def launch(self, run: TaskRun) -> None:
        """Let a task begin whose turn it is."""
        known = run.task.precomputed
        if known is None:
            self.engine.pool.submit(run)
            return
        # Any text has bytes this way, lone surrogates (from names of files, say) included.
        stdout = known.stdout.encode("utf-8", "surrogatepass") if isinstance(known.stdout, str) else known.stdout
        run.attempts = 1
        self.succeeded(run, ExecutorResult(known.exit_code, stdout, known.stderr, 0.0, run.task, None))

    # -- tasks ------------------------------------------------------------------------------------------------

    def succeeded(self, run: TaskRun, result: ExecutorResult) -> None:
        """Take a result; the task is terminal once its hook has said what to deliver."""
        run.result = result
        self.results.append(result)
        engine = self.engine
        engine.counters.tasks_done += 1
        engine.slowest.add(result)
        # Even without a hook the turn is given back first: a window of a hundred known results must not recurse.
        engine.hooks.submit(self._task_hook, run, result)

    async def _task_hook(self, run: TaskRun, result: ExecutorResult) -> None:
        engine = self.engine
        if engine.has.on_task_complete and not self.lane.closed:
            returned = None
            try:
                hook = engine.handler.on_task_complete(result)
                returned = await call_hook(hook, engine.hooks.calls, "on_task_complete", self._place, run)
                routed = engine.route(returned)
            except Exception as error:
                again = functools.partial(engine.hooks.submit, self._task_hook, run, result)
                then = functools.partial(self._terminal, run)
                indexes = self.indexes_of(run)
                failures.hook_failed(self, "on_task_complete", error, indexes, run, returned, again, then)
                return
            if routed and not self.lane.closed:
                self._deliver(routed, self.indexes_of(run), run.task, "on_task_complete")
        self._terminal(run)

    def failed(self, run: TaskRun, error: ExecutorError) -> None:
        """Take a failure and decide about it, by the handler's word or by the default."""
        if self.engine.has.on_error:
            self.engine.hooks.submit(self._error_hook, run, error)
        else:
            self._retry(run, error)

    async def _error_hook(self, run: TaskRun, error: ExecutorError) -> None:
        if self.lane.closed:
            return
        try:
            hook = self.engine.handler.on_error(run.task, error)
            action = check_action(await call_hook(hook, self.engine.hooks.calls, "on_error", self._place, run))
        except Exception as raised:
            hook_raised(
                self.engine.log,
                "on_error",
                raised,
                "on_error raised, or returned no ErrorAction and no list of tasks; the task is dead-lettered",
                task_id=run.task.task_id,
            )
            action = ErrorAction.DLQ
        if self.lane.closed:
            return
        if isinstance(action, list):
            self._replace(run, error, action)
        elif action is ErrorAction.RETRY:
            self._retry(run, error)
        elif action is ErrorAction.SKIP:
            self.engine.counters.skipped += 1
            self.give_up(run, error)
        else:
            failures.task_failed(self, run, error)

    def _retry(self, run: TaskRun, error: ExecutorError) -> None:
        engine = self.engine
        if error.never_starts:
            failures.task_failed(self, run, error)
            return
        decision = decide(run.attempts, engine.settings.executor.max_retries, engine.backoff, random.getrandbits(32))
        if isinstance(decision, Retry):
            engine.pool.retry(run, decision.delay_seconds)
        else:
            failures.task_failed(self, run, error)

    def _replace(self, run: TaskRun, error: ExecutorError, tasks: list[ExecutorTask]) -> None:
        if not tasks:
            self.engine.counters.skipped += 1
            self.give_up(run, error)
            return
        most = self.engine.settings.executor.max_replacements
        if run.generation >= most:
            failures.task_failed(
                self, run, error, f"on_error has replaced it {most} times (executor.max_replacements): "
            )
            return
        run.replaced = True
        run.error = error
        self.lane.pending.pop(run.key, None)
        indexes = self.graph.indexes_of(run)
        children = []
        for task in tasks:
            task.parent_task_id = run.task.task_id
            child = self._run_for(task)
            child.generation = run.generation + 1
            children.append(child)
            for index in indexes:
                self.runs_of[index].append(child)
        effects = self.graph.replace(run, children)
        if self.lane.order is None:
            for child in children:
                self.launch(child)
        else:
            self.lane.order.replaced(run, children)
        self._apply(effects)

    def give_up(self, run: TaskRun, error: ExecutorError) -> None:
        """Let a task be terminal that failed for good."""
        run.error = error
        self.results.append(error)
        self.engine.counters.tasks_failed += 1
        self._terminal(run)

    def _terminal(self, run: TaskRun) -> None:
        self.lane.pending.pop(run.key, None)
        if not self.lane.closed:
            self._apply(self.graph.task_done(run))
            if self.lane.order is not None:
                self.lane.order.ended(run)

    def indexes_of(self, run: TaskRun) -> Sequence[int]:
        """Return the messages that a task works for."""
        return self.graph.indexes_of(run)

    def offsets_of(self, run: TaskRun) -> list[int]:
        """Return the messages that cannot leave the pipeline without a task."""
        indexes = range(len(self.messages)) if self.held_for_window else self.indexes_of(run)
        return [self.messages[index].offset for index in indexes]

    def withdraw(self, run: TaskRun) -> None:
        """Leave the messages of a task that does not start any more to the partition's next owner."""
        self.lane.withdraw(self.offsets_of(run))

    # -- deliveries and letters -------------------------------------------------------------------------------

    def _deliver(self, routed: list[Routed], indexes: Sequence[int], task: ExecutorTask | None, hook: str) -> None:
        self.graph.hold(indexes)
        origin = Origin([self.messages[index] for index in indexes], task, hook=hook)
        self._submit(routed, origin, functools.partial(self.released, indexes, origin))

    def _submit(self, routed: list[Routed], origin: Origin, done: Callable[[], None]) -> None:
        self.engine.outbox.submit(routed, origin, done)
        self.lane.undelivered += 1
        self.lane.undelivered_bytes += origin.size_bytes

    def released(self, indexes: Sequence[int], origin: Origin | None = None) -> None:
        """Take a hold off messages: what was delivered for them, or their letter, is confirmed."""
        if not self.lane.closed:
            if origin is not None:
                self.engine.intake.delivered(self.lane, origin.size_bytes)
            self._apply(self.graph.release(indexes))

    # -- messages and the window ------------------------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, MessageComplete):
                self._message_complete(effect.index)
            elif isinstance(effect, MessageResolved):
                self._resolved(effect.index)
            else:
                self._window_complete()

    def _message_complete(self, index: int) -> None:
        self.engine.intake.finished(self.lane)
        if self.engine.has.on_message_complete:
            self.engine.hooks.submit(self._message_hook, index)
        else:
            self._apply(self.graph.message_hook_done(index))
            if self.engine.brake is not None:
                self.engine.brake.ended(self, index)

    async def _message_hook(self, index: int) -> None:
        engine = self.engine
        if self.lane.closed:
            return
        returned = None
        try:
            hook = engine.handler.on_message_complete(self._group(index))
            returned = await call_hook(hook, engine.hooks.calls, "on_message_complete", self._place, index)
            routed = engine.route(returned)
        except Exception as error:
            again = functools.partial(engine.hooks.submit, self._message_hook, index)
            then = functools.partial(self._message_over, index)
            failures.hook_failed(self, "on_message_complete", error, (index,), None, returned, again, then)
            return
        if not self.lane.closed:
            if routed:
                self._deliver(routed, (index,), None, "on_message_complete")
            self._message_over(index)

    def _message_over(self, index: int) -> None:
        self._apply(self.graph.message_hook_done(index))
        if self.lane.order is not None:
            self.lane.order.message_ended(self.entries[index])
        if self.engine.brake is not None:
            self.engine.brake.ended(self, index)

    def _group(self, index: int) -> MessageGroup:
        runs = self.runs_of[index]
        return MessageGroup(
            self.messages[index],
            [run.task for run in runs],
            [run.result for run in runs if run.result is not None],
            [run.error for run in runs if run.error is not None and not run.replaced],
            self.started_at,
            time.time(),
            sum(run.replaced for run in runs),
        )

    def _resolved(self, index: int) -> None:
        self.engine.resolved(self.lane, self.messages[index], self.entries[index], self, self.runs_of[index])

    def _window_complete(self) -> None:
        if self.engine.has.on_window_complete:
            self.lane.windows += 1
            self.engine.hooks.submit(self.window_hook)
        else:
            self._release_window()

    async def window_hook(self) -> None:
        """Call `on_window_complete` and deliver what it returns."""
        engine = self.engine
        if self.lane.closed:
            return
        returned = None
        try:
            hook = engine.handler.on_window_complete(list(self.results), list(self.messages))
            returned = await call_hook(hook, engine.hooks.calls, "on_window_complete", self._place)
            routed = engine.route(returned)
        except Exception as error:
            if not self.lane.closed:
                failures.window_hook_failed(self, error, returned)
        else:
            if engine.brake is not None and not self.lane.closed:
                engine.brake.window_ended(self)
            if routed and not self.lane.closed:
                origin = Origin(self.messages, None, hook="on_window_complete")
                self._submit(routed, origin, functools.partial(self.window_done, origin))
            else:
                self.window_done()

    def window_done(self, origin: Origin | None = None) -> None:
        """Take the end of what the window's own hook delivered."""
        if not self.lane.closed:
            if origin is not None:
                self.engine.intake.delivered(self.lane, origin.size_bytes)
            self._release_window()
            self.engine.window_done(self.lane)

    def _release_window(self) -> None:
        if self.held_for_window:
            self.held_for_window = False
            self._apply(self.graph.release(range(len(self.messages))))

    def _place(self, of: TaskRun | int | None) -> tuple[str, str]:
        """Say for which messages a hook runs: those of a task, one, or all of the window."""
        if of is None:
            return place_of(self.messages)
        return place_of([self.messages[index] for index in ((of,) if isinstance(of, int) else self.indexes_of(of))])
