"""Generators that are far ahead of their elements wait without slots and without a place, on both databases."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text, update
from tests.store.dags import Player, dag, task
from tests.store.test_groups import group, part

from tidemill.core.tasks.backlog import ItemBacklog
from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.core.tasks.structure import DagStructure, MapSource, MapStructure, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks, ListTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, CreateRun, RunRecord
from tidemill.store.calls.service_calls import EndSession, LoseSession, MapLimits
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.task_calls import EmitItems
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, WorkerAnswer
from tidemill.store.dag_tables import HOLDS_SLOTS, dag_run, dag_version, task_instance, task_map
from tidemill.store.database import Database
from tidemill.store.queries.dags.items.backlog import find_consumers
from tidemill.store.queries.dags.state.task_rows import load_plan

SECOND = 1_000_000
Key = tuple[int, int]


def over(generator: str, id: str, *upstream: str, **details: Any) -> TaskStructure:
    """A task that is mapped over a generator."""
    others = details.pop("others", ())
    names = {name: details.pop(name) for name in ("max_outstanding", "max_failed_elements") if name in details}
    factors = (MapSource("generator", generator), *others)
    mapped = MapStructure(tuple(f"x{number}" for number in range(len(factors))), factors, **names)
    return task(id, generator, *upstream, mapped=mapped, **details)


def build(**details: Any) -> DagStructure:
    return dag(task("g", is_generator=True), over("g", "e"), task("z", "e"), **details)


class Site(Player):
    """A scheduler, and a worker with a few places, whose generators yield as far as they may."""

    def __init__(self, store: Any, places: int = 1, group: int = 7) -> None:
        super().__init__(store)
        self.places, self.group = places, group
        self.running: dict[Key, ClaimedAttempt] = {}
        self.blocked: set[Key] = set()
        self.went_on: set[Key] = set()
        self.yielded: Counter[Key] = Counter()
        self.results: list[AttemptReport] = []
        self.waits = 0

    @property
    def busy(self) -> int:
        return len(self.running.keys() - self.blocked)

    async def take_turn(self) -> WorkerAnswer:
        """Report and claim; an attempt that has gone on is not listed as waiting again in the next turn."""
        reports, self.results = self.results, []
        went_on, self.went_on = self.went_on, set()
        free = self.places - self.busy
        answer = await self.turn(
            *reports, capacity=free, held=tuple(self.running), blocked=tuple(self.blocked - went_on)
        )
        for key in answer.end:
            del self.running[key]
            self.blocked.discard(key)
        for key in answer.unblocked:
            self.blocked.remove(key)
            self.went_on.add(key)
        for one in answer.claimed:
            self.running[one.task, one.epoch] = one
        assert self.busy <= self.places
        return answer

    async def finish(self, run: RunRecord, yields: int) -> None:
        """Take turns until a run has ended."""
        for _ in range(300):
            await self.schedule()
            await self.take_turn()
            await self.work(yields)
            if not self.running and not self.results and (await self.run(run)).state != "running":
                return

    async def work(self, yields: int) -> None:
        """Let each attempt that has a place do a step."""
        for key in list(self.running.keys() - self.blocked):
            one = self.running[key]
            if one.task_id == "g" and self.yielded[key] < yields:
                await self.emit(key, yields)
            else:
                del self.running[key]
                xcoms = (("return_value", "[1,2]"),) if one.task_id == "list" else ()
                self.results.append(AttemptReport(*key, Success(), xcoms, map_index=one.map_index))

    async def emit(self, key: Key, yields: int = 1 << 30) -> bool:
        """Yield a group; return whether the generator has to wait now."""
        first = self.yielded[key]
        values = tuple(str(number) for number in range(first, min(first + self.group, yields)))
        stored = await self.store.call(EmitItems(*key, first, values))
        self.yielded[key] += len(values)
        if stored.full:
            self.blocked.add(key)
            self.waits += 1
        return bool(stored.full)

    async def fill(self) -> Key:
        """Claim a generator, and let it yield until it waits, and the store knows."""
        await self.schedule()
        await self.take_turn()
        ((key, _),) = [item for item in self.running.items() if item[1].task_id == "g"]
        while not await self.emit(key):
            pass
        await self.take_turn()
        return key


async def count_slots(database: Database, *names: str) -> int:
    """Return how many slots are held, by all tasks or by those with these names."""

    def count(connection: Connection) -> int:
        total = select(func.coalesce(func.sum(task_instance.c.pool_slots), 0)).where(text(HOLDS_SLOTS))
        total = total.where(task_instance.c.task_id.in_(names)) if names else total
        return int(connection.execute(total).scalar_one())

    return int(await database.read(count))


async def read_block(database: Database, name: str = "g") -> tuple[str, int]:
    columns = task_instance.c

    def read(connection: Connection) -> tuple[str, int]:
        row = connection.execute(select(columns.state, columns.block).where(columns.task_id == name)).one()
        return row.state, row.block

    state, block = await database.read(read)
    return state, block


async def read_backlog(database: Database, run: RunRecord) -> ItemBacklog:
    def read(connection: Connection) -> ItemBacklog:
        columns = task_instance.c
        mine = (columns.run == run.id) & (columns.task_id == "g")
        task_id = connection.execute(select(columns.id).where(mine)).scalar_one()
        version = connection.execute(
            select(dag_version.c.id, dag_version.c.digest)
            .join(dag_run, dag_run.c.version_id == dag_version.c.id)
            .where(dag_run.c.id == run.id)
        ).one()
        plan = load_plan(connection, version.id, version.digest)
        return find_consumers(connection, plan, run.id, "g").measure(connection, task_id)

    found = await database.read(read)
    return ItemBacklog(*found)


@pytest.mark.parametrize(
    ("runs", "places", "slots", "details"),
    [
        pytest.param(1, 1, 1, {}, id="a pool of one, one place"),
        pytest.param(1, 1, 8, {}, id="one place"),
        pytest.param(1, 8, 1, {}, id="a pool of one"),
        pytest.param(1, 8, 8, {"max_active_tasks": 1}, id="one active task"),
        pytest.param(8, 8, 8, {}, id="eight runs on eight places"),
        pytest.param(3, 8, 1, {}, id="three runs, a pool of one"),
        pytest.param(3, 1, 8, {}, id="three runs, one place"),
    ],
)
async def test_generators_that_yield_more_than_may_wait_end_whatever_is_scarce(
    database: Database, runs: int, places: int, slots: int, details: dict[str, Any]
) -> None:
    yields, backlog = 24, 6
    site = Site(database, places, group=3)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=4, max_backlog=backlog)
    await site.store.call(SetPool("default_pool", slots))
    found = [await site.create(build(max_active_runs=8, **details), run_id="r0")]
    found += [await site.store.call(CreateRun("dag", by="tester", run_id=f"r{one}")) for one in range(1, runs)]
    for step in range(runs * 400):
        await site.schedule()
        await site.take_turn()
        await site.work(yields)
        if step % 25 == 0:
            assert await count_slots(database) <= slots
            for run in found:
                assert (await read_backlog(database, run)).items < backlog + site.group
        if not site.running and {(await site.run(run)).state for run in found} == {"success"}:
            break
    for run in found:
        states = {one.task_id: one.state for one in (await site.store.call(ListTasks("dag", run.run_id))).rows}
        assert states == {"g": "success", "e": "success", "z": "success"}
        listed = await site.store.call(ListTasks("dag", run.run_id, task_id="e"))
        assert listed.rows[0].elements.success == yields
    assert site.waits >= 2 * runs


async def test_a_generator_that_waits_gives_back_its_slot_and_gets_it_before_others(database: Database) -> None:
    site = Site(database, places=2)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=2, max_backlog=10)
    await site.store.call(SetPool("default_pool", 1))
    await site.create(build())
    key = await site.fill()
    assert await read_block(database) == ("running", 1)
    assert await count_slots(database) == 0
    for _ in range(20):
        await site.schedule()
        (_, block), holding = await read_block(database), await count_slots(database)
        assert holding <= 1
        answer = await site.take_turn()
        if answer.unblocked:
            break
        await site.work(0)
    assert answer.unblocked == (key,)
    assert (block, holding) == (3, 1)
    assert answer.claimed == ()
    assert await read_block(database) == ("running", 3)
    # The store learns by the next turn that it has gone on; a repetition changes nothing.
    for _ in range(2):
        assert (await site.take_turn()).unblocked == ()
        assert await read_block(database) == ("running", 0)


async def test_the_answer_is_repeated_until_the_attempt_has_gone_on(database: Database) -> None:
    site = Site(database)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=50, max_backlog=10)
    await site.create(build())
    key = await site.fill()
    await site.schedule()  # the window takes all of it
    assert await read_block(database) == ("running", 3)
    for _ in range(2):
        answer = await site.turn(capacity=1, held=(key,), blocked=(key,))
        assert (answer.unblocked, answer.claimed) == ((key,), ()), "its place is not given away"
    answer = await site.turn(capacity=0, held=(key,), blocked=())
    assert answer.unblocked == ()
    assert await read_block(database) == ("running", 0)


@pytest.mark.parametrize("end", ["clear", "mark", "cancel", "lose", "drain", "report"])
@pytest.mark.parametrize("phase", [1, 2, 3])
async def test_an_attempt_that_waits_ends_as_a_running_one_does(database: Database, end: str, phase: int) -> None:
    site = Site(database)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=2 if phase == 1 else 50, max_backlog=10)
    run = await site.create(dag(task("g", is_generator=True, pool_slots=2), over("g", "e"), task("z", "e")))
    key = await site.fill()
    if phase == 2:
        await site.store.call(SetPool("default_pool", 1))  # it does not fit any more
    await site.schedule()
    assert await read_block(database) == ("running", phase)
    match end:
        case "clear":
            await site.store.call(ClearTasks("dag", run.run_id, ("g",), "tester"))
        case "mark":
            await site.store.call(MarkTasks("dag", run.run_id, ("g",), "failed", "tester"))
        case "cancel":
            await site.store.call(CancelRun("dag", run.run_id, "tester"))
        case "lose":
            await site.store.call(LoseSession(site.worker))
        case "drain":
            await site.turn(AttemptReport(*key, Loss()))
            await site.store.call(EndSession(site.worker))
        case "report":
            await site.turn(AttemptReport(*key, Success()))
    if end in ("clear", "mark", "cancel"):
        assert await read_block(database) == ("ending", phase)
        assert await count_slots(database, "g") == 2 * (phase == 3)
        assert key in (await site.turn(held=(key,), blocked=(key,))).end
        await site.turn()
    state = {"mark": "failed", "cancel": "failed", "report": "success", "lose": "queued", "drain": "queued"}
    await site.schedule()
    found = await read_block(database)
    assert found[1] == 0
    assert found[0] in (state.get(end, "scheduled"), "queued" if end == "clear" else "")


async def test_a_map_that_waits_for_the_end_of_its_generator_holds_it_up_for_nothing(database: Database) -> None:
    site = Site(database, places=4)
    await site.begin()
    site.map_limits = MapLimits(max_backlog=10)
    run = await site.create(dag(task("g", is_generator=True), task("t", "g"), over("g", "e", "t")))

    # The limit of a map that has not opened is the default; this one is not asked at all.
    def limit(connection: Connection) -> None:
        connection.execute(update(task_map).values(max_outstanding=4, max_length=1_000, max_backlog=10))

    await database.write(limit)
    await site.finish(run, 50)
    assert site.waits == 0
    assert (await site.run(run)).state == "success"


@pytest.mark.parametrize("upstream", ["g", "t"])
async def test_a_group_one_of_whose_tasks_waits_for_the_end_of_its_generator_holds_it_up_for_nothing(
    database: Database, upstream: str
) -> None:
    site = Site(database, places=4)
    await site.begin()
    site.map_limits = MapLimits(max_backlog=10)
    over_generator = group(MapSource("generator", "g"))
    run = await site.create(dag(task("g", is_generator=True), task("t", "g"), over_generator, part("a", upstream)))

    def limit(connection: Connection) -> None:
        connection.execute(update(task_map).values(max_outstanding=4, max_length=1_000, max_backlog=10))

    await database.write(limit)
    await site.finish(run, 30)
    assert site.waits == 0
    assert (await site.run(run)).state == "success"


@pytest.mark.parametrize("failed", [False, True])
async def test_a_map_that_is_open_again_and_waits_for_the_end_of_its_generator_holds_it_up_for_nothing(
    database: Database, failed: bool
) -> None:
    site = Site(database, places=4)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=4, max_backlog=10)
    over_both = over("g", "e", "list", others=(MapSource("xcom", "list", "return_value"),))
    run = await site.create(dag(task("g", is_generator=True), task("list", "g"), over_both))
    if failed:
        await site.report(await site.claim_one(), Failure("no", may_retry=False))
        await site.schedule()
    else:
        await site.finish(run, 5)
    assert (await site.run(run)).state == ("failed" if failed else "success")
    names = () if failed else ("g", "list")
    await site.store.call(ClearTasks("dag", run.run_id, names, "tester", failed=failed))

    await site.finish(run, 40)

    assert site.waits == 0
    assert (await site.run(run)).state == "success"
    listed = await site.store.call(ListTasks("dag", run.run_id, task_id="e"))
    assert listed.rows[0].elements.success == 80


async def test_a_generator_waits_for_a_map_that_waits_for_another_task(database: Database) -> None:
    site = Site(database, places=1)
    await site.begin()
    run = await site.create(dag(task("g", is_generator=True), task("slow"), over("g", "e", "slow")))

    def limit(connection: Connection) -> None:
        connection.execute(update(task_map).values(max_outstanding=4, max_length=1_000, max_backlog=10))

    await database.write(limit)
    site.map_limits = MapLimits(max_outstanding=4, max_backlog=10)
    await site.finish(run, 50)
    assert site.waits
    assert (await site.run(run)).state == "success"


async def test_a_generator_that_waits_goes_on_and_ends_once_no_map_wants_more(database: Database) -> None:
    site = Site(database)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=2, max_backlog=10)
    run = await site.create(dag(task("g", is_generator=True), over("g", "e")))
    key = await site.fill()
    await site.store.call(MarkTasks("dag", run.run_id, ("e",), "success", "tester"))
    await site.schedule()
    assert (await site.take_turn()).unblocked == (key,)
    stored = await site.store.call(EmitItems(*key, site.yielded[key], ("1",)))
    assert (stored.wanted, stored.full) == (False, False)


async def test_a_product_takes_an_item_once_all_its_elements_exist(database: Database) -> None:
    site = Site(database)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=5, max_backlog=100)
    run = await site.create(dag(task("g", is_generator=True), over("g", "e", others=(MapSource("literal", length=2),))))
    await site.schedule()
    await site.take_turn()
    ((key, _),) = site.running.items()
    await site.store.call(EmitItems(*key, 0, ('"a"', '"bb"', '"ccc"', '"dddd"')))
    assert await read_backlog(database, run) == ItemBacklog(4, 18)
    await site.schedule()  # five of eight elements
    assert await read_backlog(database, run) == ItemBacklog(2, 11)
    await site.store.call(EmitItems(*key, 4, ('"\u00e9"',)))
    assert await read_backlog(database, run) == ItemBacklog(3, 15), "bytes count, not characters"


async def test_a_map_keeps_the_limits_with_which_it_opened(database: Database) -> None:
    site = Site(database)
    await site.begin()
    site.map_limits = MapLimits(max_outstanding=2, max_map_length=5, max_backlog=9)
    mapped = MapStructure(("x",), (MapSource("literal", length=5),))
    run = await site.create(dag(task("m", mapped=mapped)))
    assert len(await site.claim()) == 2
    site.map_limits = MapLimits(max_outstanding=4, max_map_length=4)
    again = await site.create(dag(task("m", mapped=mapped), id="other"))
    assert len(await site.claim()) == 0, "it is too long"
    assert (await site.run(again)).state == "failed"
    head = (await site.store.call(ListTasks("dag", run.run_id, task_id="m"))).rows[0]
    assert head.elements.created == 2
