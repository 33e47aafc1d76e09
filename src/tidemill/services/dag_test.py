"""`tidemill dags test`: one run of a DAG in this process, on a temporary store.

Scheduler turns, attempts and triggers alternate on the main thread, so that a breakpoint stops everything. The store
functions that decide states, retries and deferrals are those of `tidemill dev`. Variables and connections come from the
folder's store.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, InvariantError, RemoteError
from tidemill.core.tasks.endings import AttemptEnding, Deferral, Failure, Idle, Loss, Skip
from tidemill.core.tasks.instance import format_instance
from tidemill.dags.attempt.current import serving
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.exceptions import DagError
from tidemill.dags.execution.elements import PlaceLeft
from tidemill.dags.execution.running import run_attempt
from tidemill.dags.file_errors import explain_file_error
from tidemill.dags.loading import LoadedFile, load_file
from tidemill.dags.structure.building import serialize_dag
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.services.conf_lists import send_lists
from tidemill.services.dag_store import NoStoreError, open_dag_store
from tidemill.services.map_limits import build_map_limits
from tidemill.services.parser.program import describe_failure
from tidemill.services.triggerer.hosting.ending import explain_fault
from tidemill.services.triggerer.hosting.loading import create_trigger, encode_ending, encode_payload, read_identity
from tidemill.services.triggerer.tasks.starts import StartRenderer
from tidemill.services.triggerer.tasks.trigger_services import TriggerServices
from tidemill.services.worker.task.services import StoreServices
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.instance_calls import ListTasks
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord
from tidemill.store.calls.service_calls import BeginSession, MapLimits, SchedulerAnswer, SchedulerTurn, StoreFile
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.stream_calls import EndStream, StreamBatch, TakeEvents
from tidemill.store.calls.task_calls import GetConnection, GetVariable
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    FailTrigger,
    FiredEvent,
    HeldTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import (
    AttemptReport,
    CallbackReport,
    ClaimedAttempt,
    WorkerTurn,
)
from tidemill.store.dag_plan import read_structure
from tidemill.store.database import StoreCalls
from tidemill.store.engines.opening import open_store
from tidemill.triggers.streams.routing import find_events

T = TypeVar("T")

#: A file whose import takes longer than this is named.
SLOW_SECONDS = 5.0
#: The longest wait before the next check for due work.
_LOOK_SECONDS = 0.5
_TRIGGERS = 1000


def run_dag_test(
    settings: Settings,
    folder: Path,
    dag_id: str,
    conf: dict[str, Any],
    logical_us: int | None,
    say: Callable[[str], None],
) -> str:
    """Run a DAG once and return the final state of the run, `success` or `failed`.

    Args:
        settings: Provides `store`, for variables and connections.
        folder: The folder of DAG files.
        dag_id: The DAG.
        conf: The configuration of the run.
        logical_us: The logical date; None: the run has none.
        say: Prints progress for the user.

    Raises:
        ConfigError: The DAG does not exist, or its file is broken.
    """
    path, loaded = find_dag(folder, dag_id)
    with contextlib.ExitStack() as closing:
        owned = OwnedFolder("tidemill-dag-test-")
        closing.callback(owned.cleanup)
        runner = closing.enter_context(asyncio.Runner())
        store = runner.run(open_store(f"sqlite:///{owned.path}/dags.db"))
        try:
            test = _Test(runner, store, loaded, _Shared(runner, settings, folder), say, build_map_limits(settings.dags))
            closing.callback(test.close)
            return test.run(path.relative_to(folder), dag_id, conf, logical_us)
        finally:
            runner.run(store.close())


def find_dag(folder: Path, dag_id: str) -> tuple[Path, LoadedFile]:
    """Return the file that defines a DAG, and its content.

    Files that mention the id are loaded first; the others only if none of these defines the DAG.

    Raises:
        ConfigError: No file defines the DAG.
    """
    files = sorted(path for path in folder.rglob("*.py") if not path.name.startswith("."))
    name = dag_id.encode(errors="replace")
    problems: list[str] = []
    others: list[str] = []
    for path in sorted(files, key=lambda path: name not in path.read_bytes()):
        try:
            with _telling_when_slow(path.relative_to(folder)):
                loaded = load_file(path, folder)
        except (Exception, SystemExit) as error:
            problems.append(f"{path.relative_to(folder)}: {explain_file_error(error)}")
            if name in path.read_bytes() and _is_from_file(error, path):
                traceback.print_exc(file=sys.stderr)
            continue
        if dag_id in loaded.dags:
            return path, loaded
        others += loaded.dags
    near = difflib.get_close_matches(dag_id, others, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    broken = f"; {len(problems)} of the files could not be read: {'; '.join(problems[:3])}" if problems else ""
    raise ConfigError(f"no file in {folder} defines the DAG {dag_id!r}{meant}{broken}")


def _is_from_file(error: BaseException, path: Path) -> bool:
    """Return whether a traceback leads to a line of the file; errors found after its import have none."""
    frames = traceback.extract_tb(error.__traceback__)
    return not isinstance(error, DagError) or any(Path(frame.filename).name == path.name for frame in frames)


@contextlib.contextmanager
def _telling_when_slow(path: Path) -> Iterator[None]:
    """Name the file if its import is slow: the import may never end, and has no time limit here."""
    text = f"still importing {path} after {SLOW_SECONDS:g} s; press Ctrl-C to see where"
    timer = threading.Timer(SLOW_SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print(f"interrupted while importing {path}:\n{describe_failure(interrupt)}", file=sys.stderr, flush=True)
        raise
    finally:
        timer.cancel()


class _Shared:
    """Variables and connections of the folder's store, opened for each access; without a store there are none."""

    def __init__(self, runner: asyncio.Runner, settings: Settings, folder: Path) -> None:
        self._runner, self._settings, self._folder = runner, settings, folder

    def ask(self, call: Call[T]) -> T | None:
        return self._runner.run(self.answer(call))

    async def answer(self, call: Call[T]) -> T | None:
        try:
            store = await open_dag_store(self._settings, self._folder)
        except NoStoreError:
            return None
        try:
            return await store.call(call)
        finally:
            await store.close()


class _Test:
    """A single run in this process."""

    def __init__(
        self,
        runner: asyncio.Runner,
        store: StoreCalls,
        loaded: LoadedFile,
        shared: _Shared,
        say: Callable[[str], None],
        limits: MapLimits,
    ) -> None:
        self._limits = limits
        self._runner, self._store, self._loaded, self._shared, self._say = runner, store, loaded, shared, say
        self._request = 0
        #: The errors of tasks that were already shown to the user.
        self._told: dict[int, str] = {}
        # Triggers progress only while the loop runs, between attempts.
        self._triggers: dict[int, asyncio.Task[None]] = {}
        self._tokens: dict[int, int] = {}
        self._fired = asyncio.Event()
        self._renderer = StartRenderer()
        # A generator task sends its values from a thread of its own.
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the thread that renders templates."""
        self._renderer.close()

    def ask(self, call: Call[T]) -> T:
        """Answer a call of an attempt or of this module."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._ask(call)
        # Coroutines of a task call the store from their own loop, which a call blocks at a worker, too.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._ask, call).result()

    def _ask(self, call: Call[T]) -> T:
        with self._lock:
            if isinstance(call, TakeEvents) and call.wait_us:
                return cast(T, self._runner.run(self._take(call)))
            found = self._runner.run(self._store.call(call))
            # Values set during the run are in the run's own store.
            is_shared = found is None and type(call) in (GetVariable, GetConnection)
            return cast(T, self._shared.ask(call)) if is_shared else found

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        """Return at once: attempts run one at a time, so elements begin after their generator has ended."""

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        """End the attempt, so that others can run; it begins again with the elements that are left."""
        raise PlaceLeft

    async def _take(self, call: TakeEvents) -> tuple[StreamBatch, ...]:
        """Let the triggers work until one of them has an event for the attempt, or its wait is over."""
        until = time.monotonic() + call.wait_us / 1e6
        while True:
            self._fired.clear()
            batches = await self._store.call(call)
            left = until - time.monotonic()
            if left <= 0 or any(batch.events or batch.ended for batch in batches):
                return batches
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fired.wait(), left)

    def run(self, path: Path, dag_id: str, conf: dict[str, Any], logical_us: int | None) -> str:
        about = (socket.gethostname(), "", os.getpid())
        self._service = self.ask(BeginSession("dev", "test", *about, queues=("default",), capacity=1))
        structure = serialize_dag(self._loaded.dags[dag_id])
        stored = self.ask(StoreFile(str(path), self._loaded.digest, self._loaded.modules, None, (structure,)))
        for each in stored:
            if each.refused:
                raise ConfigError(each.refused)
        tasks = self._loaded.dags[dag_id].task_dict.values()
        queues = tuple({task.queue for task in tasks} | {"default"})
        # The pools of the folder's store are irrelevant here, because attempts run one at a time.
        for pool in {task.pool for task in tasks}:
            self.ask(SetPool(pool, max(task.pool_slots for task in tasks if task.pool == pool)))
        try:
            sent = send_lists(self.ask, read_structure(structure), conf, lambda done, total: None)
            run = self.ask(CreateRun(dag_id, "test", logical_us, sent.text, by="tidemill dags test", stage=sent.stage))
        except CallRefusedError as error:
            raise ConfigError(str(error)) from error
        for warning in run.warnings:
            self._say(f"warning: {warning}")
        while True:
            turn = self.ask(SchedulerTurn(self._service, map_limits=self._limits))
            if turn.broken_runs:
                raise InvariantError(
                    "the run cannot continue; this is a bug in tidemill, please report it with the log"
                )
            found = self.ask(GetRun(dag_id, run.run_id))
            assert found is not None
            worked = self._work(queues)
            if found.ended_us is not None and not worked:
                self._tell_failures(found)
                return found.state
            if not worked and not turn.more:
                self._runner.run(self._wait(turn))

    def _tell_failures(self, run: RunRecord) -> None:
        """Show failures without an attempt: timeouts, failed triggers, and maps over values other than lists."""
        for task in self.ask(ListTasks(run.dag_id, run.run_id, ("failed", "upstream_failed"))).rows:
            # The attempt that runs all elements of a task has said how many failed.
            iterates = task.elements is not None and task.elements.iterated
            told = tuple(self._told.values()) if iterates else (self._told.get(task.id),)
            if task.error is not None and task.error not in told:
                state = task.state.replace("_", " ")
                self._say(f"--- {format_instance(task.task_id, task.map_index)}: {state}: {task.error}")

    def _work(self, queues: tuple[str, ...]) -> bool:
        """Run one attempt or callback; returns whether there was one."""
        self._request += 1
        answer = self.ask(WorkerTurn(self._service, self._request, capacity=1, queues=queues))
        for attempt in answer.claimed:
            self._report(attempt, self._make(attempt))
        return bool(answer.claimed)

    def _make(self, attempt: ClaimedAttempt) -> AttemptResult:
        what = (
            f"try {attempt.try_number}" if attempt.resume is None else attempt.resume.method or "handle_trigger_events"
        )
        if attempt.callback is not None:
            what = attempt.callback.name
        self._say(f"--- {_name(attempt) if attempt.task_id else attempt.dag_id}: {what}")
        return run_attempt(self._loaded.dags[attempt.dag_id], attempt, StoreServices(attempt, self))

    def _report(self, attempt: ClaimedAttempt, result: AttemptResult) -> None:
        self._request += 1
        if attempt.callback is not None:
            error = result.ending.error if isinstance(result.ending, Failure) else None
            callback = CallbackReport(attempt.callback.id, error)
            self.ask(WorkerTurn(self._service, self._request, callbacks=(callback,)))
            return
        ending = result.ending
        if isinstance(ending, Failure):
            self._told[attempt.task] = ending.error
        self._say(f"--- {_name(attempt)}: {_describe(ending)}")
        report = AttemptReport(
            attempt.task,
            attempt.epoch,
            ending,
            result.xcoms,
            result.skip,
            result.skip_all_downstream,
            map_index=attempt.map_index,
            label=result.label,
        )
        (outcome,) = self.ask(WorkerTurn(self._service, self._request, reports=(report,))).outcomes
        if outcome.reason:
            raise InvariantError(
                f"the result of {_name(attempt)} cannot be stored: {outcome.reason}; please report this"
            )

    async def _wait(self, turn: SchedulerAnswer) -> None:
        """Run the triggers of deferred tasks until one ends or other work is due."""
        self._request += 1
        for each in await self._store.call(ClaimTriggers(self._service, self._request, capacity=_TRIGGERS)):
            self._tokens[each.id] = each.token
            self._triggers[each.id] = asyncio.ensure_future(self._run_trigger(each))
        held = tuple((number, self._tokens[number]) for number in self._triggers)
        for stopped in await self._store.call(HeldTriggers(self._service, held)):
            self._triggers[stopped.id].cancel()
        seconds = _LOOK_SECONDS
        if turn.next_due_us is not None:
            seconds = max(0.0, min(seconds, (turn.next_due_us - turn.now_us) / 1e6))
        if not self._triggers:
            await asyncio.sleep(seconds)
            return
        fired = asyncio.ensure_future(self._fired.wait())
        waits = (*self._triggers.values(), fired)
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        fired.cancel()
        self._fired.clear()
        self._triggers = {number: task for number, task in self._triggers.items() if task not in done}

    async def call(self, request: Call[T]) -> T:
        """Answer a call of a trigger."""
        found = await self._store.call(request)
        is_shared = found is None and type(request) in (GetVariable, GetConnection)
        return cast(T, await self._shared.answer(request)) if is_shared else found

    async def _run_trigger(self, claimed: ClaimedTrigger) -> None:
        with serving(TriggerServices(self, KnownSecrets())):
            await self._fire_events(claimed)

    async def _fire_events(self, claimed: ClaimedTrigger) -> None:
        error: str | None
        self._say(f"--- {_name(claimed)}: waits for {claimed.classpath}")
        try:
            is_template = claimed.start is not None and claimed.start.rendered
            kwargs = await self._renderer.render(claimed) if is_template else claimed.kwargs
            trigger = create_trigger(str(claimed.id), claimed.classpath, kwargs)
            events = find_events(trigger)
            try:
                async for event in events:
                    at_us, ending = time.time_ns() // 1000, encode_ending(event)
                    identity = read_identity(event) if claimed.streams else None
                    fired = FiredEvent(claimed.id, claimed.token, encode_payload(event), identity, at_us, ending)
                    self._request += 1
                    await self._store.call(StoreEvents(self._service, self._request, (fired,)))
                    self._fired.set()
                    if not claimed.streams or ending is not None:
                        return
            finally:
                if (close := getattr(events, "aclose", None)) is not None:
                    await close()
                await trigger.cleanup()
            error = None if claimed.streams else "the trigger ended without an event"
        except asyncio.CancelledError:
            raise
        except BaseException as fault:
            error = explain_fault(fault)
        with contextlib.suppress(RemoteError):
            if claimed.streams:
                await self._store.call(EndStream(self._service, claimed.id, claimed.token, error))
            else:
                await self._store.call(FailTrigger(self._service, claimed.id, claimed.token, error or ""))
        self._fired.set()


def _name(claimed: ClaimedAttempt | ClaimedTrigger) -> str:
    return format_instance(claimed.task_id, claimed.map_index)


def _describe(result: AttemptEnding) -> str:
    match result:
        case Failure(error=error):
            return f"failed: {error}"
        case Skip():
            return "skipped"
        case Deferral(classpath=classpath):
            return f"deferred to {classpath}"
        case Loss():
            return "waits for the next element"
        case Idle():
            return "waits for the next event"
    return "done"
