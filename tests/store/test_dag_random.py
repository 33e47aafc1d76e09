"""Random DAGs under random schedules of everything that can happen, against an evaluator that rescans all states.

The evaluator keeps nothing but the states: whenever something has happened, it looks at all tasks that wait, in waves.
The store keeps tallies, and looks at nothing but successors. Both have to agree at every step.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.size import sized
from tests.store.dags import ENDED, Player, dag, task
from tests.store.replay import StoredLife, check_replay, read_lives
from tests.store.server import PostgresServer

from tidemill.core.tasks.dependencies import OutcomeTally, Readiness, TaskOutcome, TriggerRule, Upstream, decide
from tidemill.core.tasks.endings import Deferral, Failure, Loss, Skip, Success
from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import LoseSession
from tidemill.store.calls.setting_calls import ListPools
from tidemill.store.calls.trigger_calls import ClaimTriggers, FailTrigger, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind
from tidemill.store.dag_plan import build_plan
from tidemill.store.engines.opening import open_store

ACTIVE = "active"
RULES = [rule.value for rule in TriggerRule]


@st.composite
def structures(draw: st.DrawFn) -> list[TaskStructure]:
    """Tasks in a line, each with edges from earlier ones; some are setups, teardowns, or in the scope of a setup."""
    tasks: list[TaskStructure] = []
    for number in range(draw(st.integers(1, 9))):
        names = [one.id for one in tasks]
        upstream = tuple(sorted(draw(st.sets(st.sampled_from(names), max_size=3)))) if names else ()
        setups = tuple(one.id for one in tasks if one.is_setup and one.id in upstream)
        others = [one.id for one in tasks if one.is_setup and one.id not in upstream]
        kind = draw(st.sampled_from(["", "", "", "setup", "teardown"]))
        scope = tuple(sorted(draw(st.sets(st.sampled_from(others))))) if others and kind != "teardown" else ()
        rule = "all_done_setup_success" if kind == "teardown" else draw(st.sampled_from(["all_success", *RULES]))
        tasks.append(
            TaskStructure(
                f"t{number}",
                upstream=upstream,
                setups=setups,
                scope=scope,
                rule=rule,
                is_setup=kind == "setup",
                is_teardown=kind == "teardown",
                fails_run=kind == "teardown" and draw(st.booleans()),
                retries=draw(st.integers(0, 1)),
                retry_delay_us=0,
                pool_slots=draw(st.integers(1, 2)),
            )
        )
    return tasks


STEPS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 1 << 16)), min_size=6, max_size=30)


@dataclass
class Evaluator:
    """Knows the states, and nothing else."""

    structure: DagStructure
    states: dict[str, str] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    skips: dict[str, set[str]] = field(default_factory=dict)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.plan = build_plan(self.structure)
        self.states = {one.id: "none" for one in self.structure.tasks}
        self.settle()

    def settle(self) -> None:
        while True:
            decided = {
                one.id: readiness
                for one in self.structure.tasks
                if self.states[one.id] == "none" and (readiness := self.judge(one)) is not Readiness.WAIT
            }
            if not decided:
                return
            names = {Readiness.RUN: ACTIVE, Readiness.SKIP: "skipped", Readiness.FAIL: "upstream_failed"}
            self.states.update((name, names[readiness]) for name, readiness in decided.items())

    def judge(self, one: TaskStructure) -> Readiness:
        if any(one.id in names for names in self.skips.values()):
            return Readiness.SKIP
        tallies = [self.count(names) for names in (one.upstream, one.setups, one.scope)]
        return decide(TriggerRule(one.rule), Upstream(*tallies))

    def count(self, names: tuple[str, ...]) -> OutcomeTally:
        states = [self.states[name] for name in names]
        return OutcomeTally(len(names), *(states.count(outcome.value) for outcome in TaskOutcome))

    def end(self, name: str, state: str) -> None:
        self.states[name] = state
        self.settle()

    def clear(self, names: set[str]) -> None:
        for name in names:
            self.states[name] = "none"
            self.started.discard(name)
            self.skips.pop(name, None)
        if names:
            self.cancelled = False
        self.settle()

    def cancel(self) -> None:
        if all(state in ENDED for state in self.states.values()):
            return
        for name, state in self.states.items():
            if state not in ENDED:
                self.states[name] = "failed" if name in self.started else "skipped"
        self.cancelled = True

    def end_of_run(self) -> str:
        if any(state not in ENDED for state in self.states.values()):
            return "running"
        bad = any(self.states[name] in ("failed", "upstream_failed") for name in self.find_leaves())
        return "failed" if bad or self.cancelled else "success"

    def find_leaves(self) -> list[str]:
        tasks = {one.id: one for one in self.structure.tasks}
        counting = {name for name, one in tasks.items() if not one.is_teardown or one.fails_run}
        after = {name: {one.id for one in tasks.values() if name in one.upstream} for name in tasks}
        return [name for name in counting if not after[name] & counting] or [name for name in tasks if not after[name]]


class Game:
    """One run, played on the store and on the evaluator."""

    def __init__(self, player: Player, structure: DagStructure) -> None:
        self.player = player
        self.structure = structure
        self.model = Evaluator(structure)
        self.names = [one.id for one in structure.tasks]
        self.held: dict[str, ClaimedAttempt] = {}
        self.ended: list[AttemptReport] = []
        self.run: RunRecord
        self.lost = 0

    async def begin(self) -> None:
        self.run = await self.player.create(self.structure)
        await self.check()

    async def step(self, kind: int, number: int) -> None:
        name = self.names[number % len(self.names)]
        await self.player.schedule()
        match kind:
            case 0 | 1 | 2:
                await self.claim(1 + number % 3)
            case 3 | 4 | 5 | 6 | 7 if self.held:
                await self.report(sorted(self.held)[number % len(self.held)], kind, number)
            case 8 if self.ended:
                await self.say_again(self.ended[number % len(self.ended)])
            case 9:
                await self.fire(number)
            case 10 if self.lost < 4:
                await self.lose()
            case 11:
                await self.clear(name, number)
            case 12:
                await self.mark(name, number)
            case 13 if number % 4 == 0:
                await self.player.store.call(CancelRun(self.structure.id, self.run.run_id, "tester"))
                self.model.cancel()
                self.held.clear()
        await self.check()

    async def claim(self, capacity: int) -> None:
        for attempt in (await self.player.turn(capacity=capacity)).claimed:
            assert self.model.states[attempt.task_id] == ACTIVE
            assert attempt.task_id not in self.held
            self.held[attempt.task_id] = attempt
            self.model.started.add(attempt.task_id)

    async def report(self, name: str, kind: int, number: int) -> None:
        attempt = self.held.pop(name)
        after = [one.id for one in self.structure.tasks if name in one.upstream]
        skip: tuple[str, ...] = ()
        match kind:
            case 3 | 4:
                result: object = Success()
                skip = tuple(one for one in after if number % 3 == 0 and random.Random(number).random() < 0.5)
                everything = number % 11 == 1
                if everything:
                    self.model.skips[name] = set(self.model.plan.list_skipped(name))
                elif skip:
                    self.model.skips[name] = set(skip)
                self.model.end(name, "success")
            case 5:
                result, everything = Failure("it failed", may_retry=number % 2 == 0), False
                if attempt.try_number >= attempt.max_tries or number % 2:
                    self.model.end(name, "failed")
            case 6:
                result, everything = (Skip() if number % 2 else Loss()), False
                if number % 2:
                    self.model.end(name, "skipped")
            case _:
                result, everything = Deferral("package.Trigger", "{}", "resume"), False
        report = AttemptReport(attempt.task, attempt.epoch, result, skip=skip, skip_all_downstream=everything)  # type: ignore[arg-type]
        (outcome,) = (await self.player.turn(report)).outcomes
        assert outcome.kind is OutcomeKind.MOVED
        self.ended.append(report)

    async def say_again(self, report: AttemptReport) -> None:
        (outcome,) = (await self.player.turn(report)).outcomes
        assert outcome.kind is OutcomeKind.ALREADY

    async def fire(self, number: int) -> None:
        store, triggerer = self.player.store, await self.player.begin_service("triggerer")
        claimed = await store.call(ClaimTriggers(triggerer, 1, 1 + number % 2))
        for one in claimed:
            if number % 3:
                event = FiredEvent(one.id, one.token, "1", None, 0)
                (outcome,) = await store.call(StoreEvents(triggerer, one.id, (event,)))
                assert outcome.kind == "stored"
                continue
            before = (await self.player.tasks(self.run))[one.task_id]
            assert await store.call(FailTrigger(triggerer, one.id, one.token, "no")) is OutcomeKind.MOVED
            if before.tries >= before.max_tries:
                self.model.end(one.task_id, "failed")
        await store.call(LoseSession(triggerer, is_death=False))

    async def lose(self) -> None:
        self.lost += 1
        await self.player.store.call(LoseSession(self.player.worker))
        self.player.worker = await self.player.begin_service("worker")
        self.held.clear()

    async def clear(self, name: str, number: int) -> None:
        names = {name}
        if number % 3 == 0:
            names |= set(self.model.plan.list_downstream([name]))
        failed = number % 5 == 0
        if failed:
            names = {one for one in names if self.model.states[one] in ("failed", "upstream_failed")}
        names = {one for one in names if self.model.states[one] != "none"}
        request = ClearTasks(self.structure.id, self.run.run_id, (name,), "tester", number % 3 == 0, failed)
        assert set(await self.player.store.call(request)) == names
        for one in names:
            self.held.pop(one, None)
        self.model.clear(names)

    async def mark(self, name: str, number: int) -> None:
        state = ("success", "failed", "skipped")[number % 3]
        request = MarkTasks(self.structure.id, self.run.run_id, (name,), state, "tester")  # type: ignore[arg-type]
        changed = await self.player.store.call(request)
        assert changed == (() if self.model.states[name] == state else (name,))
        if changed:
            if all(one in ENDED for one in self.model.states.values()):
                self.model.cancelled = False
            self.held.pop(name, None)
            self.model.states[name] = state
            if state == "success":
                after = self.model.plan.list_downstream([name])
                self.model.clear({one for one in after if self.model.states[one] == "upstream_failed"})
            self.model.settle()

    async def check(self) -> None:
        await self.player.turn(held=tuple((one.task, one.epoch) for one in self.held.values()))
        await self.player.schedule()
        tasks = await self.player.tasks(self.run)
        seen = {name: one.state if one.state in (*ENDED, "none") else ACTIVE for name, one in tasks.items()}
        assert seen == self.model.states
        assert (await self.player.run(self.run)).state == self.model.end_of_run()
        held = {name for name, one in tasks.items() if one.state == "running"}
        assert held == self.held.keys()
        used = sum(one.pool_slots for one in tasks.values() if one.state in ("queued", "running"))
        assert (await self.player.store.call(ListPools()))[0].used == used

    async def finish(self) -> None:
        """Play to the end: nothing may be stuck."""
        for _ in range(100):
            await self.fire(1)
            await self.player.schedule()
            await self.claim(10)
            for name in sorted(self.held):
                await self.report(name, 3, 1 << 16)
            await self.check()
            if self.model.end_of_run() != "running":
                for life in await self.read_lives():
                    check_replay(life)
                return
        raise AssertionError(f"the run never ends: {self.model.states}")

    async def read_lives(self) -> list[StoredLife]:
        return await self.player.store.read(lambda connection: read_lives(connection, [self.run.id]))


class Table:
    """A store for many games."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        self.runner = runner
        self.store = runner.run(open_store(url))
        self.player = runner.run(Player(self.store).begin())
        self.numbers = itertools.count()

    def play(self, tasks: list[TaskStructure], steps: list[tuple[int, int]]) -> None:
        self.runner.run(self._play(tasks, steps))

    async def _play(self, tasks: list[TaskStructure], steps: list[tuple[int, int]]) -> None:
        game = Game(self.player, dag(*tasks, id=f"dag{next(self.numbers)}"))
        try:
            await game.begin()
            for kind, number in steps:
                await game.step(kind, number)
            await game.finish()
        finally:
            await self.store.call(CancelRun(game.structure.id, game.run.run_id, "tester"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def sqlite_table(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    path: Path = tmp_path_factory.mktemp("random") / "store.db"
    table = Table(runner, f"sqlite:///{path}")
    yield table
    runner.run(table.store.close())


@pytest.fixture(scope="module")
def postgres_table(runner: asyncio.Runner, postgres: PostgresServer) -> Iterator[Table]:
    table = Table(runner, runner.run(postgres.new_database()))
    yield table
    runner.run(table.store.close())


def play_random_runs(table: Table, count: int) -> None:
    """Play this many runs of random DAGs."""

    @settings(
        max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(structures(), STEPS)
    def play(tasks: list[TaskStructure], steps: list[tuple[int, int]]) -> None:
        table.play(tasks, steps)

    play()


def test_sqlite_agrees_with_an_evaluator_that_rescans(sqlite_table: Table, long_run: bool) -> None:
    play_random_runs(sqlite_table, sized(20, 40) if long_run else 10)


def test_postgresql_agrees_with_an_evaluator_that_rescans(postgres_table: Table, long_run: bool) -> None:
    play_random_runs(postgres_table, sized(5, 10) if long_run else 3)


def test_the_evaluator_can_disagree(sqlite_table: Table) -> None:
    game = Game(sqlite_table.player, dag(task("a"), task("b", "a"), id="disagrees"))
    sqlite_table.runner.run(game.begin())
    game.model.states["b"] = "skipped"

    with pytest.raises(AssertionError):
        sqlite_table.runner.run(game.check())
    sqlite_table.runner.run(sqlite_table.store.call(CancelRun("disagrees", game.run.run_id, "tester")))


def test_a_journal_can_lead_to_another_state_than_the_stored_one(sqlite_table: Table) -> None:
    game = Game(sqlite_table.player, dag(task("a"), id="differs"))
    sqlite_table.runner.run(game.begin())
    sqlite_table.runner.run(game.finish())
    (life,) = sqlite_table.runner.run(game.read_lives())

    with pytest.raises(AssertionError, match="success"):
        check_replay(replace(life, journal=life.journal[:-1]))
    with pytest.raises(AssertionError, match="no input"):
        check_replay(replace(life, journal=life.journal[1:]))
