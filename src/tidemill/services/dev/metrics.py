"""The metrics of DAGs, from counts in the store and from the calls of all services.

`MeasuredStore` wraps the store and observes these calls; its counters start with its process.

Invariants: names of DAGs, runs and tasks never appear in labels; the number of remembered events is bounded.
"""

from __future__ import annotations

import asyncio
import bisect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tidemill.core.tasks.endings import ENDINGS
from tidemill.runtime.loop.durations import DURATION_BOUNDS
from tidemill.runtime.loop.loop_calls import await_on_loop
from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.families import Distribution, Family
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.store.calls.call import Call
from tidemill.store.calls.count_calls import CountStore, StoreCounts
from tidemill.store.calls.dag_calls import DagRecord, ListDags
from tidemill.store.calls.service_calls import BeatSession, BeginSession, EndSession
from tidemill.store.calls.setting_calls import ListPools, PoolRecord
from tidemill.store.calls.trigger_calls import ClaimTriggers, EventOutcomeKind, StoreEvents
from tidemill.store.calls.worker_calls import OutcomeKind, WorkerTurn
from tidemill.store.database import StoreCalls, StoreClient
from tidemill.store.doorbell import Doorbell

T = TypeVar("T")

WORKER = Definition("worker_info", Kind.INFO, "The worker: the value is always 1.", ("worker_id", "version"))
TASKS = Definition("tasks", Kind.GAUGE, "Tasks of runs that have not ended, by state.", ("state",))
RUNS = Definition("dag_runs", Kind.GAUGE, "Runs that have not ended, by state.", ("state",))
ATTEMPTS = Definition("attempts_total", Kind.COUNTER, "Attempts of tasks that ended, by outcome.", ("outcome",))
POOLS = Definition("pool_slots", Kind.GAUGE, "Slots of pools: held and free.", ("pool", "state"))
DELAY = Definition("schedule_delay_seconds", Kind.GAUGE, "How long the oldest scheduled run has been due.")
RESUME = Definition(
    "resume_seconds", Kind.HISTOGRAM, "The time from a stored event to the claim of the task that it resumes."
)
BROKEN = Definition("parse_errors", Kind.GAUGE, "Files of DAGs that cannot be parsed.")
SLOTS = Definition("worker_slots", Kind.GAUGE, "Slots of workers: busy with attempts, and free.", ("state",))
PROCESSES = Definition("task_processes", Kind.GAUGE, "Worker processes that run tasks or are ready to.")
TRIGGERS = Definition("task_triggers", Kind.GAUGE, "Triggers of deferred tasks that triggerers run.")
EVENTS = Definition("task_events_total", Kind.COUNTER, "Events of the triggers of tasks that were stored.")
LAG = Definition(
    "service_lag_seconds", Kind.GAUGE, "How late the event loop of a service was at its last beat.", ("service",)
)

DEFINITIONS: tuple[Definition, ...] = (
    *(WORKER, TASKS, RUNS, ATTEMPTS, POOLS, DELAY, RESUME, BROKEN),
    *(SLOTS, PROCESSES, TRIGGERS, EVENTS, LAG),
)

OUTCOMES = tuple(kind.lower() for kind in ENDINGS)
_STATES = ("none", "scheduled", "queued", "running", "deferred", "up_for_retry", "ending")
#: The maximum number of triggers and resumed tasks to remember.
MAX_REMEMBERED = 50_000
#: The measures in a heartbeat expire after this time; services beat every 5 s.
SAID_SECONDS = 20.0
_SECONDS = 5.0
_PAGE = 500


class CallMeter:
    """Counts attempts and resumes from calls and their answers. Updated on the store's loop; read from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._attempts = dict.fromkeys(OUTCOMES, 0)
        self._resumes = [0] * (len(DURATION_BOUNDS) + 1)
        self._resume_seconds = 0.0
        # the task of each trigger, and whether it streams: its first event is not its last one
        self._tasks: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        self._fired: OrderedDict[int, float] = OrderedDict()  # the time of the event that resumes each task
        self._events = 0
        self._kinds: OrderedDict[int, str] = OrderedDict()  # the kind of each session
        # the time and the measures of each session's last heartbeat
        self._said: dict[int, tuple[float, dict[str, float]]] = {}

    def note(self, request: Call[Any], answer: Any) -> None:
        """Count a call and its answer."""
        match request:
            case WorkerTurn():
                with self._lock:
                    self._note_turn(request, answer)
            case ClaimTriggers():
                for trigger in answer:
                    _remember(self._tasks, trigger.id, (trigger.task, trigger.streams))
            case StoreEvents():
                for event, outcome in zip(request.events, answer, strict=True):
                    task, streams = self._tasks.get(event.trigger, (None, False))
                    if not streams:
                        self._tasks.pop(event.trigger, None)
                    if task is not None and outcome.kind is EventOutcomeKind.STORED:
                        # The first of the events that wait resumes the task.
                        _remember(self._fired, task, self._fired.get(task, self._now()))
                        self._events += 1
            case BeginSession():
                _remember(self._kinds, answer, request.kind)
            case BeatSession() if answer:
                with self._lock:
                    self._said[request.session] = (self._now(), request.measures)
            case EndSession():
                with self._lock:
                    self._said.pop(request.session, None)
            case _:
                pass

    def _note_turn(self, request: WorkerTurn, answer: Any) -> None:
        for report, outcome in zip(request.reports, answer.outcomes, strict=True):
            if outcome.kind is OutcomeKind.MOVED:
                self._attempts[type(report.result).__name__.lower()] += 1
                # Events that came while the attempt ran resume nothing.
                self._fired.pop(report.task, None)
        for attempt in answer.claimed:
            fired = self._fired.pop(attempt.task, None)
            if fired is not None and attempt.resume is not None:
                seconds = self._now() - fired
                self._resumes[bisect.bisect_left(DURATION_BOUNDS, seconds)] += 1
                self._resume_seconds += seconds

    def read_services(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the measures of all services, summed by name, and the greatest lag by kind of service."""
        until = self._now() - SAID_SECONDS
        totals: dict[str, float] = {}
        lags: dict[str, float] = {}
        with self._lock:
            # A killed process sends no more heartbeats.
            self._said = {session: said for session, said in self._said.items() if said[0] >= until}
            for session, (_, measures) in self._said.items():
                kind = self._kinds.get(session, "")
                for name, value in measures.items():
                    totals[name] = totals.get(name, 0.0) + value
                if kind:
                    lags[kind] = max(lags.get(kind, 0.0), measures.get("lag_seconds", 0.0))
        return {**totals, "events": self._events}, lags

    def read(self) -> tuple[dict[str, int], Distribution]:
        """Return the number of attempts by outcome, and the distribution of the time to resume tasks."""
        with self._lock:
            return dict(self._attempts), Distribution(DURATION_BOUNDS, list(self._resumes), self._resume_seconds)


def _remember(known: OrderedDict[int, T], key: int, value: T) -> None:
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)


class MeasuredStore:
    """A store that reports its calls to a meter.

    Args:
        store: Answers the calls.
        meter: Counts the calls.
    """

    def __init__(self, store: StoreClient, meter: CallMeter) -> None:
        self._store = store
        self._meter = meter

    @property
    def label(self) -> str:
        """The name of the store in messages."""
        return self._store.label

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell of the store."""
        return self._store.doorbell

    async def call(self, request: Call[T]) -> T:
        """Return the answer to a call; see `StoreCalls.call`."""
        answer = await self._store.call(request)
        self._meter.note(request, answer)
        return answer

    async def close(self) -> None:
        await self._store.close()


def find_delay(dags: list[DagRecord], now_us: int) -> float:
    """Return how long the oldest scheduled run has been due, in seconds; 0 if none is due."""
    due = [dag.next_us for dag in dags if dag.active and not dag.paused and dag.next_us is not None]
    return max(0, now_us - min(due, default=now_us)) / 1_000_000


class DagMetrics:
    """Collects the metrics of DAGs for a scrape, on any thread except the loop's.

    Args:
        store: Answers calls, on the loop only.
        loop: The event loop of the store.
        meter: The meter of the calls.
        worker: The values of the labels of `worker_info`.
    """

    def __init__(
        self, store: StoreCalls, loop: asyncio.AbstractEventLoop, meter: CallMeter, worker: tuple[str, str]
    ) -> None:
        self._store = store
        self._loop = loop
        self._meter = meter
        self._worker = worker

    def collect(self) -> list[Family]:
        """Return the current metrics.

        Raises:
            RemoteError: The store failed.
            TimeoutError: The store does not answer.
        """
        counts, pools, dags = await_on_loop(self._loop, self._ask(), _SECONDS)
        return list(self._build(counts, pools, find_delay(dags, STORE_CLOCK.now_us())))

    async def _ask(self) -> tuple[StoreCounts, tuple[PoolRecord, ...], list[DagRecord]]:
        dags: list[DagRecord] = []
        after = None
        while True:
            page = await self._store.call(ListDags(after, _PAGE))
            dags += page.rows
            if (after := page.next) is None:
                break
        return await self._store.call(CountStore()), await self._store.call(ListPools()), dags

    def _build(self, counts: StoreCounts, pools: tuple[PoolRecord, ...], delay: float) -> Iterator[Family]:
        attempts, resumes = self._meter.read()
        yield Family(WORKER, [(self._worker, 1)])
        yield Family(TASKS, [((state,), counts.tasks.get(state, 0)) for state in _STATES])
        yield Family(RUNS, [((state,), counts.runs.get(state, 0)) for state in ("queued", "running")])
        yield Family(ATTEMPTS, [((outcome,), number) for outcome, number in attempts.items()])
        slots = [((pool.name, "held"), pool.used) for pool in pools]
        slots += [((pool.name, "free"), max(0, pool.slots - pool.used)) for pool in pools]
        yield Family(POOLS, slots)
        yield Family(DELAY, [((), delay)])
        yield Family(RESUME, [((), resumes)])
        yield Family(BROKEN, [((), counts.broken_files)])
        said, lags = self._meter.read_services()
        yield Family(SLOTS, [((state,), said.get(f"slots_{state}", 0)) for state in ("busy", "free")])
        yield Family(PROCESSES, [((), said.get("processes", 0))])
        yield Family(TRIGGERS, [((), said.get("triggers", 0))])
        yield Family(EVENTS, [((), said["events"])])
        yield Family(LAG, [((kind,), lag) for kind, lag in sorted(lags.items())])
