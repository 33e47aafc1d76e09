"""Hosts with unequal folders: a worker takes no task whose file it lacks, and a task fails that none can run."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.store.calls.callback_calls import ListCallbacks
from tidemill.store.calls.service_calls import BeginSession, EndSession, ReportFiles, SchedulerTurn
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport, ClaimedAttempt, WorkerTurn
from tidemill.store.database import Database


class Hosts(Player):
    """A scheduler, and workers on hosts with folders of their own."""

    async def add_worker(self, *queues: str) -> int:
        return await self.store.call(BeginSession("worker", "w", "host", "boot", 1, queues or ("default",), 8))

    async def take(
        self, worker: int, *missing: str, reports: tuple[object, ...] = (), queue: str = "default"
    ) -> tuple[ClaimedAttempt, ...]:
        """Take the turn of a worker that lacks these files."""
        await self.store.call(ReportFiles(worker, missing))
        callbacks = tuple(one for one in reports if isinstance(one, CallbackReport))
        attempts = tuple(one for one in reports if isinstance(one, AttemptReport))
        request = next(self.requests)
        turn = WorkerTurn(worker, request, attempts, callbacks, capacity=8, queues=(queue,), missing=missing)
        return (await self.store.call(turn)).claimed

    async def schedule_late(self) -> None:
        """Take turns of the scheduler in which each missing file has been missing for too long."""
        while (await self.store.call(SchedulerTurn(self.scheduler, missing_file_us=0))).more:
            pass


@pytest.fixture
async def hosts(database: Database) -> Hosts:
    player = Hosts(database)
    player.scheduler = await player.begin_service("scheduler")
    return player


async def test_a_worker_that_lacks_a_file_leaves_its_tasks_to_one_that_has_it(hosts: Hosts) -> None:
    run = await hosts.create(dag(task("t"), id="a"))
    await hosts.create(dag(task("t"), id="b"))
    one, other = await hosts.add_worker(), await hosts.add_worker()
    await hosts.schedule()
    claimed = {attempt.file: attempt for attempt in await hosts.take(one)}
    assert claimed.keys() == {"a.py", "b.py"}
    lacked = claimed["a.py"]
    assert lacked.digest == "digest"
    returned = AttemptReport(lacked.task, lacked.epoch, Loss(is_return=True))

    assert await hosts.take(one, "a.py", reports=(returned,)) == ()
    await hosts.schedule_late()
    assert (await hosts.states(run)) == {"t": "queued"}, "the other one may have it"
    (again,) = await hosts.take(other)
    assert (again.file, again.try_number) == ("a.py", 1)
    await hosts.take(other, reports=(AttemptReport(again.task, again.epoch, Success()),))
    assert (await hosts.run(run)).state == "success"


async def test_a_task_fails_by_name_when_no_live_worker_of_its_queue_has_its_file(hosts: Hosts) -> None:
    structure = dag(
        task("t", callbacks=("on_failure",)), task("u", queue="large"), task("after", "t"), id="a", callbacks=()
    )
    run = await hosts.create(structure)
    one, other = await hosts.add_worker(), await hosts.add_worker()
    large = await hosts.add_worker("large")
    await hosts.schedule()
    for worker in (one, other):
        assert await hosts.take(worker, "a.py") == ()
    await hosts.schedule()
    assert (await hosts.states(run))["t"] == "queued", "not long enough"
    await hosts.schedule_late()
    assert await hosts.states(run) == {"t": "failed", "u": "queued", "after": "upstream_failed"}
    found = (await hosts.tasks(run))["t"]
    assert found.error is not None
    assert found.error.startswith("MissingFileError: ")
    assert "'default'" in found.error
    assert "a.py" in found.error
    (callback,) = (await hosts.store.call(ListCallbacks("a", run.run_id))).rows or (None,)
    if callback is None:  # it was due in the same turn
        await hosts.schedule_late()
        (callback,) = (await hosts.store.call(ListCallbacks("a", run.run_id))).rows
    assert callback.state == "failed"
    (attempt,) = await hosts.take(large, queue="large")
    assert attempt.task_id == "u"


async def test_a_worker_that_ends_or_finds_the_file_changes_what_the_queue_has(hosts: Hosts) -> None:
    run = await hosts.create(dag(task("t", retries=1, retry_delay_us=0), id="a"))
    one, other = await hosts.add_worker(), await hosts.add_worker()
    await hosts.schedule()
    await hosts.take(one, "a.py")
    await hosts.store.call(EndSession(other))
    await hosts.store.call(ReportFiles(one))
    await hosts.schedule_late()
    assert (await hosts.states(run)) == {"t": "queued"}
    await hosts.take(one, "a.py")
    await hosts.store.call(SchedulerTurn(hosts.scheduler, missing_file_us=0))
    found = (await hosts.tasks(run))["t"]
    assert (found.state, found.tries) in (("up_for_retry", 1), ("scheduled", 1), ("queued", 1))
    await hosts.schedule()
    (attempt,) = await hosts.take(one)
    assert attempt.try_number == 2
    await hosts.store.call(EndSession(one))
    await hosts.schedule_late()
    assert (await hosts.states(run)) == {"t": "queued"}, "a queue without workers waits for one"


async def test_a_callback_that_is_given_back_is_not_lost(hosts: Hosts) -> None:
    run = await hosts.create(dag(task("t"), id="a", callbacks=("on_failure",)))
    one, other = await hosts.add_worker(), await hosts.add_worker()
    await hosts.schedule()
    (attempt,) = await hosts.take(one)
    reports: tuple[object, ...] = (AttemptReport(attempt.task, attempt.epoch, Failure("it failed")),)
    for _ in range(8):
        claimed = await hosts.take(one, reports=reports)
        assert claimed[0].callback is not None
        reports = (CallbackReport(claimed[0].callback.id, lost=True, returned=True),)
    assert await hosts.take(one, "a.py", reports=reports) == ()
    (claimed_there,) = await hosts.take(other)
    assert claimed_there.callback is not None
    await hosts.take(other, reports=(CallbackReport(claimed_there.callback.id),))
    (callback,) = (await hosts.store.call(ListCallbacks("a", run.run_id))).rows
    assert callback.state == "done"
