"""DAGs for tests of the store, and a driver that plays scheduler and worker by calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, delete, insert, select, update

from tidemill.core.tasks.endings import AttemptEnding, Success
from tidemill.core.tasks.expansion import find_count
from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.core.tasks.structure import DagStructure, MapSource, MapStructure, TaskStructure
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.instance_calls import ListTasks, TaskRecord
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord
from tidemill.store.calls.service_calls import BeginSession, MapLimits, SchedulerAnswer, SchedulerTurn, StoreFile
from tidemill.store.calls.worker_calls import (
    AttemptReport,
    AttemptReportOutcome,
    ClaimedAttempt,
    WorkerAnswer,
    WorkerTurn,
)
from tidemill.store.dag_tables import task_instance, task_map

ENDED = ("success", "failed", "skipped", "upstream_failed")


def task(id: str, *upstream: str, **details: Any) -> TaskStructure:
    return TaskStructure(id, "EmptyOperator", upstream=tuple(sorted(upstream)), **details)


def dag(*tasks: TaskStructure, id: str = "dag", **details: Any) -> DagStructure:
    return DagStructure(id, tuple(sorted(tasks, key=lambda one: one.id)), **details)


def encode(structure: DagStructure) -> bytes:
    return msgspec.json.encode(structure, order="sorted")


class Player:
    """Plays scheduler and worker."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.scheduler = self.worker = 0
        self.requests = itertools.count(1)
        self.map_limits = MapLimits()

    async def begin(self) -> Player:
        self.scheduler = await self.begin_service("scheduler")
        self.worker = await self.begin_service("worker")
        return self

    async def begin_service(self, kind: str) -> int:
        return await self.store.call(BeginSession(kind, kind, "machine", "boot", 17))

    async def create(self, structure: DagStructure, **details: Any) -> RunRecord:
        """Store a DAG, and create a run of it."""
        file = StoreFile(f"{structure.id}.py", "digest", structures=(encode(structure),))
        (stored,) = await self.store.call(file)
        assert not stored.refused
        return await self.store.call(CreateRun(structure.id, by="tester", **details))

    async def schedule(self) -> SchedulerAnswer:
        """Take turns until there is nothing more to do at once."""
        while True:
            answer = await self.store.call(SchedulerTurn(self.scheduler, map_limits=self.map_limits))
            if not (answer.more or answer.again):
                return answer

    async def turn(self, *reports: AttemptReport, capacity: int = 0, **details: Any) -> WorkerAnswer:
        turn = WorkerTurn(self.worker, next(self.requests), reports, capacity=capacity, **details)
        return await self.store.call(turn)

    async def claim(self, capacity: int = 100) -> tuple[ClaimedAttempt, ...]:
        await self.schedule()
        return (await self.turn(capacity=capacity)).claimed

    async def claim_one(self) -> ClaimedAttempt:
        (attempt,) = await self.claim()
        return attempt

    async def report(self, attempt: ClaimedAttempt, result: AttemptEnding, **details: Any) -> AttemptReportOutcome:
        answer = await self.turn(AttemptReport(attempt.task, attempt.epoch, result, **details))
        return answer.outcomes[0]

    async def play(
        self, results: Callable[[ClaimedAttempt], AttemptEnding] = lambda _: Success(), rounds: int = 100
    ) -> None:
        """Run everything until nothing is left to run."""
        for _ in range(rounds):
            # A turn that ends attempts which are gone may make tasks ready, for the turn after it.
            attempts = await self.claim() or await self.claim()
            if not attempts:
                return
            await self.turn(
                *[AttemptReport(one.task, one.epoch, results(one)) for one in attempts if one.callback is None]
            )
        raise AssertionError("there is always something to run")

    async def run(self, run: RunRecord) -> RunRecord:
        found = await self.store.call(GetRun(run.dag_id, run.run_id))
        assert found is not None
        return found

    async def tasks(self, run: RunRecord) -> dict[str, TaskRecord]:
        listed = await self.store.call(ListTasks(run.dag_id, run.run_id, map_index=None))
        return {format_instance(one.task_id, one.map_index): one for one in listed.rows}

    async def states(self, run: RunRecord) -> dict[str, str]:
        return {name: one.state for name, one in (await self.tasks(run)).items()}


def fail_these(names: Iterable[str]) -> Callable[[ClaimedAttempt], AttemptEnding]:
    from tidemill.core.tasks.endings import Failure

    bad = set(names)
    return lambda attempt: Failure("it failed") if attempt.task_id in bad else Success()


async def add_elements(database: Any, run: RunRecord, task_id: str, *states: str) -> list[int]:
    """Add elements to a task, in these states; return their row ids by index."""

    def add(connection: Connection) -> list[int]:
        columns = task_instance.c
        own = and_(columns.run == run.id, columns.task_id == task_id, columns.map_index == UNMAPPED)
        row = dict(connection.execute(select(task_instance).where(own)).mappings().one())
        del row["id"]
        rows = [row | {"map_index": index, "state": state, "pending": 0} for index, state in enumerate(states)]
        statement = insert(task_instance).returning(columns.id)
        added = [int(connection.execute(statement, one).scalar_one()) for one in rows]
        head = connection.execute(select(columns.id).where(own)).scalar_one()
        if connection.execute(select(task_map.c.task).where(task_map.c.task == head)).first() is None:
            counted = Counter(filter(None, (find_count(TaskState(state)) for state in states)))
            counts = {"opened": 1, "created": len(states), "made": len(states), **counted}
            connection.execute(insert(task_map).values(task=head, run=run.id, task_id=task_id, **counts))
        return added

    return list(await database.write(add))


def mapped(id: str, *upstream: str, **details: Any) -> TaskStructure:
    """A task that is mapped over the list that its first upstream task returns."""
    return task(
        id, *upstream, mapped=MapStructure(("x",), (MapSource("xcom", upstream[0], "return_value"),)), **details
    )


async def add_map(database: Any, run: RunRecord, task_id: str, **counts: Any) -> None:
    """Open the map of a mapped task with these counts; no element is added."""

    def add(connection: Connection) -> None:
        columns = task_instance.c
        own = and_(columns.run == run.id, columns.task_id == task_id, columns.map_index == UNMAPPED)
        connection.execute(
            update(task_instance).where(own).values(state="mapped", pending=0, started_us=columns.since_us)
        )
        mine = and_(task_map.c.run == run.id, task_map.c.task_id == task_id)
        head = connection.execute(select(columns.id).where(own)).scalar_one()
        connection.execute(delete(task_map).where(mine))
        connection.execute(insert(task_map).values(task=head, run=run.id, task_id=task_id, opened=1, **counts))

    await database.write(add)
