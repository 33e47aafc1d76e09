"""A store in memory for tests of workers: attempts to claim, and what is said of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.task_lines import TaskLine, decode_lines
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.iteration_calls import GetParts, IterationPage, KeepParts, PartCounts, PartToRun
from tidemill.store.calls.service_calls import BeatSession, ReportFiles
from tidemill.store.calls.task_calls import (
    AppendLog,
    ConnectionRecord,
    EmitItems,
    GetConnection,
    GetVariable,
    GetXCom,
    ItemsStored,
    MapItem,
    PushXCom,
    SetVariable,
)
from tidemill.store.calls.worker_calls import (
    AttemptReport,
    AttemptReportOutcome,
    CallbackReport,
    ClaimedAttempt,
    LogPart,
    OutcomeKind,
    WorkerAnswer,
    WorkerTurn,
)


def make_attempt(task: int, task_id: str, **changes: Any) -> ClaimedAttempt:
    values: dict[str, Any] = {
        "epoch": 3,
        "run": 1,
        "dag_id": "d",
        "run_id": "r1",
        "map_index": -1,
        "try_number": 1,
        "max_tries": 1,
        "file": "d.py",
        "queue": "default",
        "operator": "",
        "run_kind": "manual",
        "run_started_us": 1,
        "logical_us": 1_700_000_000_000_000,
        "interval_start_us": None,
        "interval_end_us": None,
        "conf": "{}",
        "params": "{}",
    }
    return ClaimedAttempt(task=task, task_id=task_id, **{**values, **changes})


class MemoryStore:
    """Answers the calls of one worker; `bell` rings when there is something to claim."""

    def __init__(self) -> None:
        self.waiting: list[ClaimedAttempt] = []
        self.claimed: dict[tuple[int, int], ClaimedAttempt] = {}
        self.reports: dict[int, AttemptReport] = {}
        self.callbacks: dict[int, CallbackReport] = {}
        self.parts: dict[tuple[int, int], dict[int, LogPart]] = {}
        self.appended: list[float] = []
        self.xcoms: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.connections: dict[str, ConnectionRecord] = {}
        self.turns: list[WorkerTurn] = []
        self.files: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.to_end: set[tuple[int, int]] = set()
        self.away = self.ended = False
        #: How many answers to turns with reports or claims are lost.
        self.losing = 0
        #: What generators yielded, the number of values of which the store has enough, and whether those that wait may
        #: go on; what they yielded by then is taken.
        self.yielded: list[str] = []
        self.backlog = 1 << 30
        self.taken = 0
        self.may_go_on = False
        self.refused: Counter[str] = Counter()
        #: What is raised for values of generators.
        self.fault: Exception | None = None
        #: How many reports cannot be stored.
        self.unstored = 0
        #: The elements of an attempt that runs all of them, and the indexes of those that have ended.
        self.elements = 0
        self.ended_elements: set[int] = set()
        self._answers: dict[int, WorkerAnswer] = {}
        self._rung = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def doorbell(self) -> MemoryStore:
        return self

    def queue(self, *attempts: ClaimedAttempt) -> None:
        self.waiting += attempts
        self._rung.set()

    def go_on(self) -> None:
        """Let attempts that wait at their `yield` go on."""
        self.may_go_on = True
        self._rung.set()

    def end(self, task: int, epoch: int = 3) -> None:
        """Let the task move on."""
        self.to_end.add((task, epoch))
        self._rung.set()

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._rung.wait()
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    async def call(self, request: Any) -> Any:
        await asyncio.sleep(0)
        if self.away:
            self.refused[type(request).__name__] += 1
            raise RemoteError("the store is away")
        if self.ended:
            raise CallRefusedError(RefusalKind.FENCED, "the service has ended")
        match request:
            case WorkerTurn():
                is_new = request.request not in self._answers
                answer = self._turn(request)
                if self.losing and is_new and (request.reports or answer.claimed):
                    self.losing -= 1
                    raise RemoteError("the connection was lost before the answer")
                return answer
            case BeatSession():
                return True
            case ReportFiles(_, missing, differing):
                self.files.append((missing, differing))
            case AppendLog(parts):
                self.appended.append(time.monotonic())
                for part in parts:
                    self._keep(part)
            case GetXCom(task_ids=ids):
                return tuple(self.xcoms.get(each) for each in ids)
            case PushXCom(task, _, key, value):
                if task < 0:
                    raise CallRefusedError(RefusalKind.FENCED, "the attempt has been replaced")
                self.xcoms[key] = value
            case EmitItems(first=first, values=values):
                if self.fault is not None:
                    raise self.fault
                assert first == len(self.yielded)
                self.yielded += values
                total = len(self.yielded)
                return ItemsStored(total, wanted=True, full=total - self.taken >= self.backlog)
            case GetParts(after=after, limit=limit):
                found = [number for number in range(after + 1, self.elements) if number not in self.ended_elements]
                parts = [PartToRun(one, 0, one, 1, (MapItem(one, (one,), (str(one),)),)) for one in found[:limit]]
                return IterationPage(tuple(parts), self.elements - 1, len(found) <= limit)
            case KeepParts(parts=parts):
                self.ended_elements |= {part.number for part in parts}
                return PartCounts(len(self.ended_elements), 0, 0)
            case SetVariable(key, value):
                self.variables[key] = value
            case GetVariable(key):
                return self.variables.get(key)
            case GetConnection(id):
                return self.connections.get(id)
        return None

    def _turn(self, turn: WorkerTurn) -> WorkerAnswer:
        self.turns.append(turn)
        if turn.request in self._answers:
            return self._answers[turn.request]
        outcomes = [OutcomeKind.MOVED if self.unstored <= 0 else OutcomeKind.UNSTORED for _ in turn.reports]
        for report in turn.reports if self.unstored <= 0 else ():
            assert report.task not in self.reports or report.request
            assert (report.task, report.epoch) in self.claimed
            self.reports[report.task] = report
            if report.log_end is not None:
                self._keep(report.log_end)
        self.unstored -= len(turn.reports)
        for callback in turn.callbacks:
            self.callbacks[callback.id] = callback
            if callback.log_end is not None:
                self._keep(callback.log_end)
        capacity = turn.capacity - (len(turn.blocked) if self.may_go_on else 0)
        given, self.waiting = self.waiting[: max(0, capacity)], self.waiting[max(0, capacity) :]
        self.claimed |= {(each.task, each.epoch): each for each in given}
        answer = WorkerAnswer(
            tuple(AttemptReportOutcome(one.task, kind) for one, kind in zip(turn.reports, outcomes, strict=True)),
            tuple(given),
            tuple(key for key in turn.held if key in self.to_end),
            time.time_ns() // 1000,
            turn.blocked if self.may_go_on else (),
        )
        if self.may_go_on and turn.blocked:
            self.taken = len(self.yielded)
        self._answers[turn.request] = answer
        return answer

    def _keep(self, part: LogPart) -> None:
        self.parts.setdefault((part.task, part.try_number), {})[part.number] = part

    def read_log(self, task: int, try_number: int = 1) -> list[TaskLine]:
        import zlib

        parts = self.parts.get((task, try_number), {})
        return [line for number in sorted(parts) for line in decode_lines(zlib.decompress(parts[number].data))]

    def text_of(self, task: int, try_number: int = 1) -> str:
        return "\n".join(line.text for line in self.read_log(task, try_number))
