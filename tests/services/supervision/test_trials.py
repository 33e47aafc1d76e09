"""A trigger that ends its process, among others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests import size
from tests.services.triggerer.deferring import Deferring
from tests.store.dags import dag, task

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.endings import Deferral
from tidemill.core.triggers.lost_hosts import REST_SECONDS
from tidemill.core.triggers.suspects import SUSPECT_DEATHS, ProcessEnd, Suspects
from tidemill.runtime.process.table import find_children, read_arguments
from tidemill.services.sessions import releasing
from tidemill.services.supervision.child import Child, Death
from tidemill.services.supervision.trials import _KILL_SECONDS, Trials, _Attempt
from tidemill.services.triggerer.tasks.trigger import END_SECONDS
from tidemill.store.calls.callback_calls import ListCallbacks
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.service_calls import BeginSession, ListSessions, LoseSession
from tidemill.store.calls.trigger_calls import ClaimTriggers
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.engines.sqlite import SqliteDatabase, open_sqlite
from tidemill.store.queries.sessions import services
from tidemill.store.tables import trigger
from tidemill.store.wire.call_server import CallServer

_CODE = """
import asyncio, os, pathlib, signal, sys, time
from tidemill.triggers.base import BaseTrigger, TriggerEvent


async def leave(error):
    raise error


def cancel_all():
    for task in asyncio.all_tasks():
        task.cancel()


HARMS = {
    "child exits": lambda: asyncio.create_task(leave(SystemExit(3))),
    "child interrupts": lambda: asyncio.create_task(leave(KeyboardInterrupt())),
    "callback exits": lambda: asyncio.get_running_loop().call_later(0.01, sys.exit),
    "stops the loop": lambda: asyncio.get_running_loop().stop(),
    "cancels all": cancel_all,
}


class Ends(BaseTrigger):
    def __init__(self, how, after):
        self.how = how
        self.after = after
        if how == "constructor":
            time.sleep(10**9)

    def serialize(self):
        return "hard.Ends", {"how": self.how, "after": self.after}

    async def run(self):
        await asyncio.sleep(self.after)
        if self.how.startswith("exit"):
            os._exit(int(self.how[4:]))
        if self.how == "sleep":
            time.sleep(10**9)
        if self.how == "helper":
            await asyncio.create_task(self.block())
        while self.how == "loop":
            pass
        if self.how in HARMS:
            HARMS[self.how]()
            await asyncio.Event().wait()
        os.kill(os.getpid(), getattr(signal, self.how))
        await asyncio.Event().wait()
        yield TriggerEvent("never")

    async def block(self):
        time.sleep(10**9)


class EndsKilled(BaseTrigger):
    def serialize(self):
        return "hard.EndsKilled", {}

    async def run(self):
        pathlib.Path(__file__).with_name("runs").touch()
        await asyncio.Event().wait()
        yield TriggerEvent("never")

    async def on_kill(self):
        os._exit(3)


class Waits(BaseTrigger):
    def __init__(self, path):
        self.path = path

    def serialize(self):
        return "hard.Waits", {"path": self.path}

    async def run(self):
        while not pathlib.Path(self.path).exists():
            await asyncio.sleep(0.05)
        yield TriggerEvent("here")
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = await open_sqlite(tmp_path / "store.db")
    yield opened
    await opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hard.py").write_text(_CODE)
    return tmp_path


@asynccontextmanager
async def triggerer(store: SqliteDatabase, folder: Path) -> AsyncIterator[list[Death]]:
    """Keep a triggerer running, as `dev` does, and yield its deaths."""
    deaths: list[Death] = []
    server = CallServer(store, folder / "calls.sock")
    await server.start()
    module = "tidemill.services.triggerer.tasks.process"
    arguments = ["-m", module, str(server.path), "--folder", str(folder)]
    about = BeginSession("triggerer", "t", "here", "boot", os.getpid())
    trials = Trials(store, arguments, os.environ, sys.stderr.fileno(), about)

    async def note_death(death: Death) -> None:
        deaths.append(death)
        for service in await store.call(ListSessions("triggerer")):
            if service.pid == death.pid:
                if not death.explained:
                    await trials.note_death(service.id, death)
                await store.call(LoseSession(service.id))

    child = Child("triggerer", arguments, os.environ, sys.stderr.fileno(), note_death)
    holder = await store.call(BeginSession("dev", "t", "here", "boot", os.getpid()))
    tasks = [asyncio.create_task(child.run()), asyncio.create_task(trials.run(holder))]
    try:
        yield deaths
    finally:
        await child.stop(10.0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await server.close()
    assert [one.kind for one in await store.call(ListSessions("triggerer"))] == []


async def defer(store: SqliteDatabase, *triggers: Deferral, id: str = "dag") -> Deferring:
    """Defer the tasks t0, t1 ... of a run to triggers."""
    deferring = Deferring(store)
    player = await deferring.player.begin()
    deferring.run = await player.create(dag(*[task(f"t{n}", retries=0) for n in range(len(triggers))], id=id))
    attempts = {one.task_id: one for one in await player.claim()}
    reports = [
        AttemptReport(attempts[f"t{n}"].task, attempts[f"t{n}"].epoch, trigger) for n, trigger in enumerate(triggers)
    ]
    await player.turn(*reports)
    return deferring


def ends(how: str, after: float = 0.1) -> Deferral:
    return Deferral("hard.Ends", json.dumps({"after": after, "how": how}), "resume")


def waits(folder: Path) -> Deferral:
    return Deferral("hard.Waits", json.dumps({"path": str(folder / "there")}), "resume")


async def find_failed(deferring: Deferring, seconds: float = 300.0) -> tuple[str, str]:
    """Return the task that fails first, and with what."""
    async with asyncio.timeout(seconds):
        while not (failed := await deferring.failed()):
            await asyncio.sleep(0.1)
    (only,) = failed
    return only.task_id, only.error or ""


async def let_resume(deferring: Deferring, folder: Path, count: int) -> None:
    """Let the triggers that wait fire."""
    (folder / "there").touch()
    async with asyncio.timeout(300):
        while len(deferring.resumed) < count:
            await deferring.take_resumed()
            await asyncio.sleep(0.1)


def find_trial_processes() -> set[int]:
    return {pid for pid in find_children(os.getpid()) if "--session" in read_arguments(pid)}


@pytest.mark.parametrize(
    ("how", "after", "named"),
    [
        pytest.param("exit3", 0.1, "ended with exit code 3", marks=pytest.mark.long),
        ("exit0", 0.1, "ended with exit code 0"),
        pytest.param("SIGSEGV", 0.1, "ended with SIGSEGV", marks=pytest.mark.long),  # in the short run: the next test
        # A signal that only `dev` sends otherwise.
        pytest.param("SIGTERM", 0.1, "ended with exit code 0", marks=pytest.mark.long),
        # A kill may come from outside: one more is needed.
        pytest.param("SIGKILL", 0.1, "ended with SIGKILL", marks=pytest.mark.long),
        # Where deaths are far apart, trials are twice as long, which is longer than the shortest trial.
        pytest.param("exit3", 4.0, "ended with exit code 3", marks=pytest.mark.long),
        pytest.param("exit3", 12.0, "ended with exit code 3", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(400)
async def test_one_that_ends_its_process_is_found_among_others_and_fails_while_those_go_on(
    store: SqliteDatabase, folder: Path, how: str, after: float, named: str
):
    deferring = await defer(store, waits(folder), waits(folder), ends(how, after), waits(folder))

    async with triggerer(store, folder) as deaths:
        culprit, error = await find_failed(deferring)
        assert culprit == "t2"
        assert error.startswith("TaskDeferralError: the process that ran only this trigger")
        assert named in error
        await let_resume(deferring, folder, 3)
        assert len(deaths) == SUSPECT_DEATHS


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_one_that_ends_a_process_well_that_took_longer_to_start_than_its_trial_is_not_cleared(
    store: SqliteDatabase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Suspects, "_find_seconds", lambda self, suspects: 0.3)
    deferring = await defer(store, ends("exit0"), waits(folder))

    async with triggerer(store, folder) as deaths:
        culprit, error = await find_failed(deferring)
        assert culprit == "t0"
        assert "ended with exit code 0" in error
        await let_resume(deferring, folder, 1)
        assert len(deaths) == SUSPECT_DEATHS


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_processes_of_trials_that_somebody_kills_blame_nobody(store: SqliteDatabase, folder: Path):
    deferring = await defer(store, waits(folder), ends("SIGSEGV", 1.0), waits(folder), waits(folder))

    async with triggerer(store, folder) as deaths:
        while len(pids := find_trial_processes()) < 2:
            assert len(deaths) <= 3
            await asyncio.sleep(0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        culprit, error = await find_failed(deferring)
        assert culprit == "t1"
        assert "ended with SIGSEGV" in error
        await let_resume(deferring, folder, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_trials_are_dropped_for_one_that_ends_the_triggerer_much_faster(store: SqliteDatabase, folder: Path):
    slow = await defer(store, waits(folder), ends("exit3", 15.0), waits(folder), id="slow")

    async with triggerer(store, folder) as deaths:
        while len(dropped := find_trial_processes()) < 2:
            assert len(deaths) <= 3
            await asyncio.sleep(0.1)
        fast = await defer(store, ends("exit4"), id="fast")
        culprit, error = await find_failed(fast)
        assert (culprit, "ended with exit code 4" in error) == ("t0", True)
        assert not dropped & find_trial_processes()
        if not size.nightly:
            return  # that it is found among others is shown above
        culprit, error = await find_failed(slow, 600)
        assert (culprit, "ended with exit code 3" in error) == ("t1", True)
        await let_resume(slow, folder, 2)


@pytest.mark.timeout(400)
async def test_those_that_harm_others_without_ending_the_process_fail_at_once_and_no_process_dies(
    store: SqliteDatabase, folder: Path
):
    harms = {
        "child exits": "raised SystemExit: 3",
        "child interrupts": "raised KeyboardInterrupt",
        "callback exits": "raised SystemExit",
        "stops the loop": "called loop.stop()",
        "cancels all": "cancelled tasks of others",
    }
    # What is cancelled with all others never happens.
    harmful = [ends(how, 0.1 if how == "cancels all" else 1.0) for how in harms]
    deferring = await defer(store, waits(folder), *harmful, waits(folder))

    async with triggerer(store, folder) as deaths:
        async with asyncio.timeout(300):
            while len(failed := await deferring.failed()) < len(harms):
                await asyncio.sleep(0.1)
        errors = {one.task_id: one.error or "" for one in failed}
        for number, said in enumerate(harms.values(), start=1):
            assert said in errors[f"t{number}"]
        await let_resume(deferring, folder, 2)
        assert not deaths


@pytest.mark.parametrize(
    "how", ["sleep", *(pytest.param(how, marks=pytest.mark.long) for how in ("loop", "constructor"))]
)
@pytest.mark.timeout(200)
async def test_one_that_blocks_the_loop_for_ever_fails_by_name_and_the_others_go_on(
    store: SqliteDatabase, folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TIDEMILL_TRIGGERER__BLOCK_LIMIT_SECONDS", "4")
    deferring = await defer(store, waits(folder), ends(how), waits(folder))

    async with triggerer(store, folder) as deaths:
        culprit, error = await find_failed(deferring, 100)
        assert culprit == "t1"
        assert "the trigger blocked the event loop of all triggers for 4 s (triggerer.block_limit_seconds), at" in error
        assert "hard.py" in error
        await let_resume(deferring, folder, 2)
        # It is known who did it: no other one is a suspect.
        assert [(death.explained, death.exit) for death in deaths] == [(True, "a trigger that blocked it")]


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_one_that_blocks_the_loop_from_a_task_of_its_own_is_found_by_trials(
    store: SqliteDatabase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which trigger a task belongs to cannot be seen."""
    monkeypatch.setenv("TIDEMILL_TRIGGERER__BLOCK_LIMIT_SECONDS", "4")
    deferring = await defer(store, waits(folder), ends("helper"), waits(folder))

    async with triggerer(store, folder) as deaths:
        culprit, error = await find_failed(deferring)
        assert (culprit, "ended with SIGKILL" in error) == ("t1", True)
        await let_resume(deferring, folder, 2)
        assert not any(death.explained for death in deaths)


async def test_a_death_that_is_reported_again_has_the_same_verdict(store: SqliteDatabase):
    trials = Trials(store, [], {}, sys.stderr.fileno(), BeginSession("triggerer", "t", "here", "boot", 1))
    # Another process was killed at the same moment, so neither death is the fault of a trigger.
    trials._suspects.note_fatal(9, ProcessEnd({}, 1.0, 5.0, killed=True))
    death = Death(1, "SIGKILL", 10.0, 5.5, True)
    assert [await trials.note_death(7, death) for _ in range(2)] == [False, False]


async def test_all_of_many_triggers_that_wait_for_no_trial_any_more_are_released(
    store: SqliteDatabase, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (services, releasing):
        monkeypatch.setattr(module, "PART", 1)
    await defer(store, *[waits(folder) for _ in range(3)])
    about = BeginSession("triggerer", "t", "here", "boot", 1)
    holder, other = [await store.call(about) for _ in range(2)]
    held = tuple(one.id for one in await store.call(ClaimTriggers(holder, 1, 10)))
    trials = Trials(store, [], {}, sys.stderr.fileno(), about)
    trials._holder = holder
    await trials._free(held)
    assert tuple(one.id for one in await store.call(ClaimTriggers(other, 1, 10))) == held
    assert len(held) == 3


async def test_suspects_of_lost_hosts_wait_until_others_were_tried_alone_and_not_longer(
    store: SqliteDatabase, folder: Path
):
    await defer(store, *[waits(folder) for _ in range(4)])
    about = BeginSession("triggerer", "t", "here", "boot", 1)
    for _ in range(2):
        lost = await store.call(about)
        assert len(await store.call(ClaimTriggers(lost, 1, 10))) == 4
        await store.call(LoseSession(lost))
    trials = Trials(store, [], {}, sys.stderr.fileno(), about)
    trials._holder = await store.call(about)
    now = asyncio.get_running_loop().time()
    trials._suspects.adopt((900,), 10.0, 2)
    tried = []
    for solo_until in (now + 600, now - 1, now - 1):
        trials._attempts[900] = _Attempt(0, asyncio.Event(), solo_until)
        await trials._take()
        tried.append(len(trials._suspects.tried))
    assert tried == [1, 3, 3], "one alone, half of the others beside it, and no more before they have waited for long"
    long_ago = update(trigger).values(changed_us=trigger.c.changed_us - round(REST_SECONDS * 1e6))
    await store.write(lambda connection: connection.execute(long_ago))
    await trials._take()
    assert len(trials._suspects.tried) == 5


def test_a_process_that_calls_on_kill_outlives_the_slowest_call():
    assert _KILL_SECONDS > 2 * END_SECONDS, "otherwise on_kill would be called again and again"


@pytest.mark.long
@pytest.mark.timeout(400)
class Away:
    """A store that is away when a session is first ended."""

    def __init__(self, store: SqliteDatabase) -> None:
        self.store, self.is_away = store, True

    async def call(self, request: Any) -> Any:
        if isinstance(request, LoseSession) and self.is_away:
            self.is_away = False
            raise RemoteError("the store is away")
        return await self.store.call(request)


async def test_the_session_of_a_process_that_ends_during_an_outage_is_ended_after_it(
    store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
):
    about = BeginSession("triggerer", "t", "here", "boot", os.getpid())
    trials = Trials(Away(store), [], {}, sys.stderr.fileno(), about)  # type: ignore[arg-type]

    async def run(attempt: _Attempt, seconds: float) -> tuple[int, str]:
        assert await store.call(ListSessions("triggerer"))
        return 0, ""

    monkeypatch.setattr(trials, "_run", run)
    await trials._call_kills()

    assert not await store.call(ListSessions("triggerer"))


async def test_one_whose_on_kill_ends_its_process_ends_one_triggerer(store: SqliteDatabase, folder: Path):
    deferring = await defer(store, Deferral("hard.EndsKilled", "{}", "resume"), waits(folder))
    other = await defer(store, waits(folder), id="other")
    run = deferring.run

    async with triggerer(store, folder) as deaths:
        async with asyncio.timeout(300):
            while not (folder / "runs").exists():
                await asyncio.sleep(0.1)
            await store.call(CancelRun(run.dag_id, run.run_id, "tester"))
            await deferring.player.schedule()
            while "failed" not in {one.state for one in (await store.call(ListCallbacks(run.dag_id, run.run_id))).rows}:
                await asyncio.sleep(0.1)
        await let_resume(other, folder, 1)
        assert len(deaths) == 1
