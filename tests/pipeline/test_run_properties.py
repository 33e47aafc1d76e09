"""Whatever happens to single messages of a run: it ends as it would without runs, and as a naive model says.

A handler with `on_message_complete`, even one that does nothing, has every known result delivered by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs
from tests.pipeline.conftest import P0, P1, Rig
from tests.pipeline.recording.test_recorder import Recorded

from tidemill.core.errors import RemoteError
from tidemill.pipeline import commits, hooks
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult, SkipMessage
from tidemill.pipeline.tasks.process import Done, ProcessOutcome
from tidemill.pipeline.windows import window as windows
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Answers, Encoded, Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.testing.scripted import ScriptedSink

#: What becomes of a payload: its sink takes it, takes it when asked again, refuses it, finds it too large, raises over
#: it, or is down when it comes first; or it cannot be encoded.
FATES = ["ok"] * 6 + ["again", "no", "large", "raise", "down", "unencodable"]
REFUSED = ("no", "large", "raise", "unencodable")
#: What the handler does with a message instead of returning payloads.
BAD = ["raise", "skip", "misroute"]


@dataclass
class Plan:
    """What is to happen to one message."""

    key: bytes | None
    payloads: list[tuple[str, str]]
    bad: str = ""
    waits: int = 0


@dataclass
class Scenario:
    """What is to happen."""

    plans: list[list[Plan]]
    is_known: bool
    window_size: int
    max_batch: int
    sink_turns: list[int]
    executor: dict[str, Any] = field(default_factory=dict)
    #: What is not known has to be found out by tasks, of which some messages have two.
    runs_tasks: bool = False


def draw(seed: int) -> Scenario:
    """Return a random scenario."""
    chance = random.Random(seed)

    def plan() -> Plan:
        return Plan(
            key=chance.choice([None, b"a", b"b"]),
            payloads=[
                (chance.choice(["one", "two", "topic"]), chance.choice(fates)) for _ in range(chance.choice(most))
            ],
            bad=chance.choice(bad),
            waits=chance.choice(waits),
        )

    # Often nothing goes wrong, so that whole windows stay runs.
    fates, bad = (
        chance.choice([["ok"], ["ok"] * 30 + FATES, FATES]),
        chance.choice([[""], [""] * 30 + BAD, [""] * 5 + BAD]),
    )
    most, waits = chance.choice([[1], [0, 1, 2, 3]]), chance.choice([[0], [0, 0, 0, 1, 5]])
    executor = {"commit": chance.choice(["message", "message", "window"])}
    if chance.random() < 0.3:
        executor["order_by"] = "key"
    return Scenario(
        plans=[[plan() for _ in range(chance.randint(0, 60))] for _ in range(2)],
        is_known=chance.random() < 0.5,
        window_size=chance.choice([1, 2, 7, 40]),
        max_batch=chance.choice([1, 3, 100]),
        sink_turns=[chance.randint(0, 6) for _ in range(chance.randint(0, 4))],
        executor=executor,
    )


class Planned(Handler[Any, Any]):
    """Does what is planned, as known results or by `transform`."""

    def __init__(self, scenario: Scenario) -> None:
        self.plans = scenario.plans

    def plan_of(self, message: SourceMessage) -> Plan:
        return self.plans[message.partition][message.offset]

    def make_payloads(self, message: SourceMessage) -> list[Any]:
        made: list[Any] = []
        plan = self.plan_of(message)
        for index, (where, fate) in enumerate(plan.payloads):
            data: Any = [message.partition, message.offset, index, fate]
            if fate == "unencodable":
                data = object()
            sink = "nowhere" if plan.bad == "misroute" else ""
            path = f"{where}{message.partition}"
            made.append(KafkaPayload(sink, path, data) if where == "topic" else FilePayload(sink, path, data))
        if plan.bad == "misroute" and not made:
            made.append(FilePayload("nowhere", "one"))
        return made


class Known(Planned):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"{m.partition}/{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult(""))
            for m in messages
        ]

    async def on_task_complete(self, result):
        partition, offset = map(int, result.task.task_id.split("/"))
        message = SourceMessage("t", partition, offset)
        plan = self.plan_of(message)
        for _ in range(plan.waits):
            await asyncio.sleep(0)
        if plan.bad in ("raise", "skip"):
            raise ValueError("cannot take it")
        made = self.make_payloads(message)
        files = [payload for payload in made if isinstance(payload, FilePayload)]
        return CollectResult(files=files, kafka=[payload for payload in made if isinstance(payload, KafkaPayload)])


class Ran(Known):
    """The same for tasks that run; the second one of a message adds nothing."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"{m.partition}/{m.offset}{end}", source_offsets=(m.offset,), binary_path="any")
            for m in messages
            for end in (("", "/second") if m.offset % 7 == 3 else ("",))
        ]

    async def on_task_complete(self, result):
        return None if result.task.task_id.endswith("/second") else await super().on_task_complete(result)


class Answering:
    """Runs nothing: tasks end well, some of them together, in the order of chance."""

    capacity = 20

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.waiting: list[Done] = []

    def open(self) -> None:
        pass

    def start(self, argv: Any, stdin: bytes, env: Any, timeout_seconds: float, done: Done) -> Done:
        self.waiting.append(done)
        if len(self.waiting) == 1:
            asyncio.get_running_loop().call_soon(self.answer)
        return done

    def answer(self) -> None:
        self.chance.shuffle(self.waiting)
        count = self.chance.randint(1, len(self.waiting))
        answered, self.waiting = self.waiting[:count], self.waiting[count:]
        if self.waiting:
            asyncio.get_running_loop().call_soon(self.answer)
        for done in answered:
            done(ProcessOutcome(0, b"", b"", 0.001, 1, None, None))

    async def kill(self, runs: Any, grace_seconds: float) -> None:
        self.waiting = [done for done in self.waiting if done not in runs]

    async def kill_all(self, grace_seconds: float) -> None:
        self.waiting = []

    def close(self) -> None:
        self.waiting = []

    def describe_wait(self) -> None:
        return None


def deliver_by_itself(window: WindowInFlight, index: int, routed: Sequence[Any], task: ExecutorTask) -> None:
    """Deliver what a task of one message led to as what a task of several leads to is delivered."""
    window.deliver(routed, (index,), task, "on_task_complete")


class Transforming(Planned):
    async def transform(self, messages):
        for _ in range(max(self.plan_of(m).waits for m in messages)):
            await asyncio.sleep(0)
        for m in messages:
            if (bad := self.plan_of(m).bad) in ("raise", "skip"):
                raise ValueError("cannot take it") if bad == "raise" else SkipMessage("not ours")
        return [self.make_payloads(m) or None for m in messages]


class KnownOneByOne(Known):
    async def on_message_complete(self, group):
        return None


class TransformingOneByOne(Transforming):
    async def on_message_complete(self, group):
        return None


class InTurn(Transforming):
    async def on_message_complete(self, group):
        m = group.source_message
        for _ in range(self.plan_of(m).waits):
            await asyncio.sleep(0)
        return CollectResult(files=[FilePayload(path=f"{m.key!r}{m.partition}", data=[m.partition, m.offset, 9, "ok"])])


def make_handler(scenario: Scenario, *, alone: bool) -> Planned:
    if scenario.runs_tasks:
        return Ran(scenario)
    if scenario.is_known:
        return KnownOneByOne(scenario) if alone else Known(scenario)
    return TransformingOneByOne(scenario) if alone else Transforming(scenario)


class Fates:
    """A sink's behaviour; as in every sink, nothing overtakes a refused payload with its key."""

    def __init__(self, sink: Any, turns: list[int]) -> None:
        self.seen: set[tuple[Any, ...]] = set()
        self.turns = list(turns)
        self.payloads = sink.payloads
        sink.send = self.send

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        for _ in range(self.turns.pop() if self.turns else 0):
            await asyncio.sleep(0)
        answers = Answers(batch)
        for index, item in enumerate(batch):
            if answers.filter_sendable([index]) and (refusal := self.refuse(item.body)) is not None:
                answers.refuse(index, refusal)
        found = answers.collect()
        self.payloads += [item.body for item, refusal in zip(batch, found, strict=True) if refusal is None]
        return found

    def refuse(self, payload: Any) -> Refusal | None:
        fate, name = payload.data[3], tuple(payload.data)
        is_first = name not in self.seen
        self.seen.add(name)
        if fate == "again" and is_first:
            return Refusal("busy", retryable=True)
        if fate == "down" and is_first:
            raise RemoteError("connection refused")
        if fate == "raise":
            raise ValueError("what is this?")
        return Refusal("no", retryable=False, oversize=fate == "large") if fate in ("no", "large") else None


SOON = {"retry_backoff": {"initial_seconds": 0.001, "max_seconds": 0.002}, "breaker": {"failures": 100_000}}


def start(scenario: Scenario, handler: Planned, **config: Any) -> Rig:
    messages = [
        SourceMessage("t", partition, offset, plan.key, b"value")
        for partition, planned in enumerate(scenario.plans)
        for offset, plan in enumerate(planned)
    ]
    with mock.patch.object(ScriptedSink, "max_batch_count", scenario.max_batch):
        run = Rig(
            handler,
            messages,
            executor={"window_size": scenario.window_size, **scenario.executor},
            delivery=SOON,
            **config,
        )
    for sink in (run.files, run.sinks["kafka"]["kafka"]):
        Fates(sink, scenario.sink_turns)
    if scenario.runs_tasks:
        run.engine.context.pool._executor = Answering(random.Random(len(messages)))
    return run.start()


def delivered(run: Rig) -> list[tuple[Any, ...]]:
    return [(*payload.data,) for payload in [*run.files.payloads, *run.sinks["kafka"]["kafka"].payloads]]


def find_lost(run: Rig) -> Counter[tuple[int, int, str]]:
    """Return how many payloads letters have, by message and kind; 1 for a letter without any."""
    found: Counter[tuple[int, int, str]] = Counter()
    for letter in run.letters.letters:
        (source,) = letter.sources
        found[source.partition, source.offset, letter.kind.value] += len(letter.original_payloads) or 1
    return found


async def is_all_settled(run: Rig, count: int) -> None:
    await run.until(lambda: run.engine.counters.messages_done >= count)
    await run.until(lambda: not any(sender.outstanding for sender in run.engine.outbox._all))
    for owned in run.engine.intake.partitions.values():
        load = run.engine.context.load._loads[owned.partition]
        await run.until(lambda load=load: load.uncommitted == 0)
        assert (owned.undelivered, owned.undelivered_bytes, owned.unresolved, owned.windows) == (0, 0, 0, 0)
        assert (load.count, load.size_bytes, load.uncommitted) == (0, 0, 0)
        assert not owned.pending
    assert run.engine.counters.in_flight == 0


@dataclass
class End:
    """How a run ended."""

    delivered: list[tuple[Any, ...]]
    lost: Counter[tuple[int, int, str]]
    skipped: int
    committed: dict[Any, int]
    rows: list[tuple[Any, ...]]
    refused: dict[str, int]


async def play(scenario: Scenario, *, alone: bool) -> End:
    run = start(scenario, make_handler(scenario, alone=alone), debug={"enabled": True, "db_dir": ""})
    await is_all_settled(run, sum(map(len, scenario.plans)))
    await run.end()
    rows = Recorded(run.recorder).rows["messages"]  # type: ignore[arg-type]
    names = ("partition", "offset", "status", "tasks", "attempts", "payloads", "error")
    progress = run.engine.progress()
    assert progress.messages_done == sum(map(len, scenario.plans))
    return End(
        delivered(run),
        find_lost(run),
        run.engine.counters.skipped,
        run.source.committed,
        sorted(tuple(row[name] for name in names) for row in rows),
        {sender.label: sender.stats.dead_lettered for sender in run.engine.outbox._all},
    )


def expect(scenario: Scenario) -> tuple[Counter[tuple[Any, ...]], Counter[tuple[int, int, str]], int]:
    """Return what a naive reading of the plans says: what is delivered, what is lost, and how many are skipped."""
    sent: Counter[tuple[Any, ...]] = Counter()
    lost: Counter[tuple[int, int, str]] = Counter()
    skipped = 0
    for partition, planned in enumerate(scenario.plans):
        for offset, plan in enumerate(planned):
            kind = "hook" if scenario.is_known else "transform"
            if plan.bad == "skip" and not scenario.is_known:
                skipped += 1
            elif plan.bad:
                lost[partition, offset, kind] += (len(plan.payloads) or 1) if plan.bad == "misroute" else 1
            for index, (_, fate) in enumerate(plan.payloads if not plan.bad else ()):
                if fate in REFUSED:
                    lost[partition, offset, "oversize" if fate == "large" else "delivery"] += 1
                else:
                    sent[partition, offset, index, fate] += 1
    return sent, lost, skipped


def check_order(scenario: Scenario, found: list[tuple[Any, ...]]) -> None:
    """Fail unless what is in one file, or has one key, is in the order of its messages."""
    by_key = "order_by" in scenario.executor and scenario.is_known
    if not by_key and scenario.is_known and any(plan.waits for planned in scenario.plans for plan in planned):
        return  # hooks that wait may return in any order
    of: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for partition, offset, index, _ in found:
        plan = scenario.plans[partition][offset]
        if not by_key or plan.key is not None:
            of[partition, plan.payloads[index][0], plan.key if by_key else None].append((offset, index))
    for where, order in of.items():
        assert order == sorted(order), where


@pytest.fixture(autouse=True, scope="module")
def _quickly():
    with mock.patch.object(commits, "COLLECT_SECONDS", 0.005):
        yield


@pytest.mark.parametrize("seed", range(40))
def test_a_run_ends_as_one_message_after_the_other_would(seed: int) -> None:
    scenario = draw(seed)
    with capture_logs():
        together = asyncio.run(play(scenario, alone=False))
        alone = asyncio.run(play(scenario, alone=True))
    sent, lost, skipped = expect(scenario)
    for end in (together, alone):
        assert Counter(end.delivered) == sent
        assert end.lost == lost
        assert end.skipped == skipped
        assert end.committed == {("t", n): len(planned) for n, planned in enumerate(scenario.plans) if planned}
    check_order(scenario, together.delivered)
    assert together.rows == alone.rows
    assert together.refused == alone.refused


def draw_tasks(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario.is_known = scenario.runs_tasks = True
    return scenario


@pytest.mark.parametrize("seed", range(4_000, 4_040))
def test_results_of_tasks_that_are_released_together_end_as_they_would_one_by_one(seed: int) -> None:
    scenario = draw_tasks(seed)
    with capture_logs():
        together = asyncio.run(play(scenario, alone=False))
        with mock.patch.object(windows, "deliver_part", deliver_by_itself):
            alone = asyncio.run(play(scenario, alone=True))
    sent, lost, _ = expect(scenario)
    for end in (together, alone):
        assert Counter(end.delivered) == sent
        assert end.lost == lost
        assert end.committed == {("t", n): len(planned) for n, planned in enumerate(scenario.plans) if planned}
    if "order_by" in scenario.executor:
        check_order(scenario, together.delivered)
    assert together.rows == alone.rows
    assert together.refused == alone.refused


@pytest.mark.parametrize("seed", range(5_000, 5_020))
def test_no_result_of_a_task_is_lost_by_a_revoke_at_any_moment(seed: int) -> None:
    chance = random.Random(-seed)
    with capture_logs():
        scenario = draw_tasks(seed)
        handler = make_handler(scenario, alone=False)
        asyncio.run(play_revoke(scenario, handler, chance, chance.choice([0, 0.01, 20])))


@pytest.mark.parametrize("seed", range(20, 40))
def test_what_runs_do_is_in_order_on_a_machine_so_slow_that_each_hook_ends_a_turn(seed: int) -> None:
    scenario = draw(seed)
    with capture_logs(), mock.patch.object(hooks, "TURN_SECONDS", -1.0):
        end = asyncio.run(play(scenario, alone=False))
    assert Counter(end.delivered) == expect(scenario)[0]
    check_order(scenario, end.delivered)


@pytest.mark.parametrize("seed", range(1_000, 1_040))
def test_nothing_is_lost_by_a_revoke_at_any_moment(seed: int) -> None:
    chance = random.Random(-seed)
    with capture_logs():
        scenario = draw(seed)
        handler = make_handler(scenario, alone=False)
        asyncio.run(play_revoke(scenario, handler, chance, chance.choice([0, 0.01, 20])))


@pytest.mark.parametrize("seed", range(3_000, 3_020))
def test_hooks_that_wait_for_their_key_lose_nothing_by_a_revoke(seed: int) -> None:
    chance = random.Random(-seed)
    with capture_logs():
        scenario = draw(seed)
        scenario.executor["order_by"], scenario.is_known = "key", False
        # What waits for a key is finished or left to the next owner: it never uses up the time.
        asyncio.run(asyncio.wait_for(play_revoke(scenario, InTurn(scenario), chance, 250), 60))


async def play_revoke(scenario: Scenario, handler: Planned, chance: random.Random, seconds: float) -> None:
    run = start(scenario, handler, kafka={"revoke_timeout_seconds": seconds})
    for _ in range(chance.randint(0, 60)):
        await asyncio.sleep(0)
    sent, lost, _ = expect(scenario)
    if isinstance(handler, InTurn):
        sent = add_hooks(scenario, sent)
    if P0 in run.engine.intake.partitions:
        if chance.random() < 0.3:
            run.source.lose(P0)
        else:
            await run.source.revoke(P0)
        committed = run.source.committed.get(P0, 0)
        check_at_least_once(run, sent, lost, committed)
        left = scenario.plans[0][committed:]
        run.source.events.on_assigned([P0])
        run.source.feed(*[SourceMessage("t", 0, committed + n, plan.key, b"value") for n, plan in enumerate(left)])
    await run.until(lambda: run.source.committed.get(P0, 0) == len(scenario.plans[0]))
    await run.until(lambda: run.source.committed.get(P1, 0) == len(scenario.plans[1]))
    await is_all_settled(run, 0)
    await run.end()
    check_at_least_once(run, sent, lost, len(scenario.plans[0]), len(scenario.plans[1]))
    assert set(delivered(run)) <= set(sent)
    of_p1 = Counter(name for name in delivered(run) if name[0] == 1)
    assert of_p1 == Counter({name: count for name, count in sent.items() if name[0] == 1}), "another partition suffered"


def add_hooks(scenario: Scenario, sent: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Return what is delivered with what `InTurn` returns for each message that it takes."""
    hooks = [
        (partition, offset, 9, "ok")
        for partition, planned in enumerate(scenario.plans)
        for offset, plan in enumerate(planned)
        if plan.bad in ("", "skip")
    ]
    return sent + Counter(hooks)


def check_at_least_once(run: Rig, sent: Any, lost: Any, *until: int) -> None:
    """Fail unless everything that is to become of the messages before these offsets has become of them."""
    found, letters = Counter(delivered(run)), find_lost(run)
    for partition, offset in enumerate(until):
        missing = [name for name in sent if name[:1] == (partition,) and name[1] < offset and not found[name]]
        assert not missing, f"committed, but not delivered: {missing}"
        missing = [name for name in lost if name[:1] == (partition,) and name[1] < offset and not letters[name]]
        assert not missing, f"committed, but not dead-lettered: {missing}"


@pytest.mark.parametrize("seed", range(2_000, 2_020))
def test_hooks_of_a_key_deliver_in_the_order_of_its_messages(seed: int) -> None:
    scenario = draw(seed)
    scenario.executor["order_by"] = "key"
    with capture_logs():
        asyncio.run(play_in_turn(scenario))


async def play_in_turn(scenario: Scenario) -> None:
    run = start(scenario, InTurn(scenario))
    await is_all_settled(run, sum(map(len, scenario.plans)))
    await run.end()
    of: dict[Any, list[int]] = defaultdict(list)
    for partition, offset, index, _ in delivered(run):
        key = scenario.plans[partition][offset].key
        if index == 9 and key is not None:
            of[partition, key].append(offset)
    for (partition, key), offsets in of.items():
        plans = scenario.plans[partition]
        assert offsets == [n for n, plan in enumerate(plans) if plan.key == key and plan.bad in ("", "skip")]
