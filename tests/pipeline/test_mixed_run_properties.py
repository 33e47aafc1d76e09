"""Whatever else there is beside tasks of one message: what is released together ends as it would one by one.

Messages have none, one or several tasks, some of which are of two messages, have known results, fail, are replaced, or
whose hooks fail; hooks of messages, of windows and of refused payloads deliver and decide, too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs
from tests.pipeline.conftest import Rig
from tests.pipeline.recording.test_recorder import Recorded
from tests.pipeline.test_run_properties import FATES, SOON, Answering, Fates, deliver_by_itself, is_all_settled

from tidemill.pipeline import commits, hooks
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, ErrorAction, ErrorKind, ExecutorTask, PrecomputedResult
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.tasks.process import Done, ProcessOutcome
from tidemill.pipeline.windows import window as windows
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.testing.scripted import ScriptedSink

MESSAGE_COLUMNS = ("partition", "offset", "status", "tasks", "attempts", "payloads", "precomputed", "error")
TASK_COLUMNS = ("task_id", "offsets", "attempt", "exit_code", "output_bytes", "kind", "labels", "parent")


class Scenario:
    """What is to happen; each thing depends on its name and the seed, not on when it happens."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.seed = seed
        self.counts = [chance.randint(0, 40), chance.randint(1, 25)]
        self.fates = chance.choice([["ok"], ["ok"] * 20 + FATES, FATES])
        self.payloads = chance.choice([[1], [0, 1, 2, 3], [0, 0, 1]])
        self.tasks = chance.choice([[1], [0, 1, 2], [1, 1, 1, 3]])
        self.of_two = chance.choice([0, 0, 0.2])
        self.known = chance.choice([0, 0, 0.3, 1])
        self.failing = chance.choice([0, 0.05, 0.3])
        self.raising = chance.choice([0, 0.05, 0.2])
        self.waits = chance.choice([[0], [0, 0, 1, 4]])
        self.hooks = {name for name in ("message", "window", "delivery") if chance.random() < 0.35}
        self.window_size = chance.choice([1, 2, 7, 40])
        self.max_batch = chance.choice([1, 3, 100])
        self.executor: dict[str, Any] = {
            "binary_path": "any",
            "commit": chance.choice(["message", "message", "window"]),
            "max_retries": 2,
        }
        self.executor["retry_backoff"] = {"initial_seconds": 0.001, "max_seconds": 0.002}
        if chance.random() < 0.3:
            self.executor["order_by"] = "key"
        if chance.random() < 0.3:  # tasks wait for sinks
            self.executor |= {"max_queued_bytes": 300, "window_max_bytes": 300}
        self.sink_turns = [chance.randint(0, 6) for _ in range(chance.randint(0, 4))]

    def chance(self, *name: object) -> random.Random:
        return random.Random(repr((self.seed, *name)))


class Mixed(Handler[Any, Any]):
    """Does what the scenario says."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.groups: list[tuple[Any, ...]] = []
        self.windows: list[tuple[Any, ...]] = []

    def make_payloads(self, name: str, message: tuple[int, int]) -> CollectResult:
        chance, made = self.scenario.chance("payloads", name), CollectResult(files=[], kafka=[])
        for number in range(chance.choice(self.scenario.payloads)):
            fate, where = chance.choice(self.scenario.fates), chance.choice(["one", "two", "topic"])
            data: Any = object() if fate == "unencodable" else [*message, f"{name}#{number}", fate]
            place = f"{where}{message[0]}"
            if where == "topic":
                made.kafka.append(KafkaPayload("", place, data))
            else:
                made.files.append(FilePayload("", place, data))
        return made

    def make_task(self, task_id: str, *offsets: int) -> ExecutorTask:
        chance = self.scenario.chance("task", task_id)
        is_known, labels = chance.random() < self.scenario.known, {"a": "b"} if chance.random() < 0.3 else {}
        known = PrecomputedResult("", exit_code=chance.choice([0, 0, 3])) if is_known else None
        return ExecutorTask(task_id, (task_id,), source_offsets=offsets, labels=labels, precomputed=known)

    async def step(self, hook: str, name: str) -> None:
        chance = self.scenario.chance(hook, name)
        for _ in range(chance.choice(self.scenario.waits)):
            await asyncio.sleep(0)
        if chance.random() < self.scenario.raising:
            raise ValueError("cannot take it")

    async def arrange(self, messages, pending):
        tasks = []
        for index, m in enumerate(messages):
            chance, name = self.scenario.chance("arrange", m.partition, m.offset), f"{m.partition}/{m.offset}"
            count = chance.choice(self.scenario.tasks)
            tasks += [self.make_task(f"{name}/{number}", m.offset) for number in range(count)]
            if chance.random() < self.scenario.of_two and index + 1 < len(messages):
                tasks.append(self.make_task(f"{name}/two", m.offset, messages[index + 1].offset))
        return tasks

    async def on_task_complete(self, result):
        task_id = result.task.task_id
        await self.step("task hook", task_id)
        partition, offset, _ = task_id.split("/")
        return self.make_payloads(task_id, (int(partition), int(offset)))

    async def on_error(self, task, error):
        chosen = self.scenario.chance("error", task.task_id).choice(["retry", "retry", "skip", "dlq", "replace", "[]"])
        if chosen == "replace" and task.task_id.count("r") < 2:
            return [self.make_task(f"{task.task_id}r{number}", *task.source_offsets) for number in range(2)]
        return [] if chosen == "[]" else ErrorAction(chosen if chosen in ("retry", "skip") else "dlq")


async def on_message_complete(self: Mixed, group: Any) -> CollectResult:
    message = group.source_message
    place = (message.partition, message.offset)
    self.groups.append((*place, len(group.tasks), len(group.results), len(group.errors), group.replaced))
    await self.step("message hook", str(place))
    return self.make_payloads(f"message {place}", place)


async def on_window_complete(self: Mixed, results: Any, messages: Any) -> CollectResult:
    place = (messages[0].partition, messages[0].offset)
    self.windows.append((*place, len(messages), sorted((type(r).__name__, r.task.task_id) for r in results)))
    await self.step("window hook", str(place))
    return self.make_payloads(f"window {place}", place)


async def on_delivery_error(self: Mixed, error: Any) -> DeliveryAction:
    await asyncio.sleep(0)
    return DeliveryAction.SKIP


HOOKS = {
    "message": ("on_message_complete", on_message_complete),
    "window": ("on_window_complete", on_window_complete),
    "delivery": ("on_delivery_error", on_delivery_error),
}


class Failing(Answering):
    """Runs nothing: which tasks fail is the scenario's."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(random.Random(scenario.seed))
        self.scenario = scenario
        self.tries: Counter[str] = Counter()

    def start(self, argv: Any, stdin: bytes, env: Any, timeout_seconds: float, done: Done) -> Done:
        task_id = argv[1]
        self.tries[task_id] += 1
        chance = self.scenario.chance("try", task_id, self.tries[task_id])
        outcome = (1, ErrorKind.EXIT) if chance.random() < self.scenario.failing else (0, None)

        def end(_: ProcessOutcome) -> None:
            done(ProcessOutcome(outcome[0], b"out", b"err", 0.001, 1, outcome[1], None))

        return super().start(argv, stdin, env, timeout_seconds, end)


class Watching(Fates):
    """Notes what is sent for messages that have left the pipeline already."""

    def __init__(self, sink: Any, scenario: Scenario, left: set[tuple[int, int]], late: list[Any]) -> None:
        super().__init__(sink, scenario.sink_turns)
        self.left, self.late = left, late
        self.holds_windows = scenario.executor["commit"] == "window"

    def refuse(self, payload: Any) -> Any:
        partition, offset, name, _ = payload.data
        if (partition, offset) in self.left and (self.holds_windows or not name.startswith("window")):
            self.late.append(payload.data)
        return super().refuse(payload)


@contextmanager
def noting(left: set[tuple[int, int]]) -> Iterator[None]:
    """Add messages to a set when they leave the pipeline."""
    one, more = OwnedPartition.resolve, OwnedPartition.resolve_all

    def resolve(owned: OwnedPartition, message: SourceMessage, *rest: Any, **named: Any) -> None:
        left.add((message.partition, message.offset))
        one(owned, message, *rest, **named)

    def resolve_all(owned: OwnedPartition, messages: Sequence[SourceMessage], *rest: Any) -> None:
        left.update((message.partition, message.offset) for message in messages)
        more(owned, messages, *rest)

    with mock.patch.multiple(OwnedPartition, resolve=resolve, resolve_all=resolve_all):
        yield


def start(scenario: Scenario, handler: Mixed, left: set[tuple[int, int]], late: list[Any]) -> Rig:
    messages = [
        SourceMessage(
            "t", partition, offset, scenario.chance("key", partition, offset).choice([None, b"a", b"b"]), b"v"
        )
        for partition, count in enumerate(scenario.counts)
        for offset in range(count)
    ]
    with mock.patch.object(ScriptedSink, "max_batch_count", scenario.max_batch):
        run = Rig(
            handler,
            messages,
            executor={"window_size": scenario.window_size, **scenario.executor},
            delivery={**SOON, "max_retries": 2},
            debug={"enabled": True, "db_dir": ""},
        )
    for sink in (run.files, run.sinks["kafka"]["kafka"]):
        Watching(sink, scenario, left, late)
    run.engine.context.pool._executor = Failing(scenario)  # type: ignore[assignment]
    return run.start()


def count_letters(run: Rig) -> Counter[tuple[Any, ...]]:
    """Return how many payloads are in letters, by messages, kind and task; 1 for a letter without any."""
    found: Counter[tuple[Any, ...]] = Counter()
    for letter in run.letters.letters:
        places = tuple((source.partition, source.offset) for source in letter.sources)
        found[places, letter.kind.value, letter.task_id] += len(letter.original_payloads) or 1
    return found


async def play(scenario: Scenario) -> dict[str, Any]:
    """Return all that is seen from outside."""
    overridden = dict(HOOKS[name] for name in scenario.hooks)
    handler: Mixed = type("Hooked", (Mixed,), overridden)(scenario)
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    left: set[tuple[int, int]] = set()
    late: list[Any] = []
    with noting(left):
        run = start(scenario, handler, left, late)
        await is_all_settled(run, sum(scenario.counts))
        await run.end()
    assert raised == []
    assert late == [], "a message left the pipeline before what its hooks returned was delivered"
    rows = Recorded(run.recorder).rows  # type: ignore[arg-type]
    for row in rows["messages"]:
        assert not row["tasks"] or row["tasks_done_at"] <= row["resolved_at"]
    return {
        "delivered": Counter(tuple(p.data) for p in [*run.files.payloads, *run.sinks["kafka"]["kafka"].payloads]),
        "letters": count_letters(run),
        "messages": sorted(tuple(row[name] for name in MESSAGE_COLUMNS) for row in rows["messages"]),
        "tasks": sorted(repr([row[name] for name in TASK_COLUMNS]) for row in rows["tasks"]),
        "committed": run.source.committed,
        "groups": sorted(handler.groups),
        "windows": sorted(handler.windows),
        "skipped": (run.engine.counters.skipped, [sender.stats.skipped for sender in run.engine.outbox._all]),
        "counts": (run.engine.counters.messages_done, run.engine.counters.tasks_done, run.engine.counters.tasks_failed),
    }


@pytest.fixture(autouse=True, scope="module")
def _quickly():
    with mock.patch.object(commits, "COLLECT_SECONDS", 0.005):
        yield


@pytest.mark.parametrize("seed", [*range(25), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(25, 150))])
def test_what_is_released_together_ends_as_it_would_one_by_one(seed: int) -> None:
    turn = -1.0 if seed % 4 == 0 else hooks.TURN_SECONDS  # or no turn of the loop is long enough for two hooks
    with capture_logs(), mock.patch.object(hooks, "TURN_SECONDS", turn):
        together = asyncio.run(play(Scenario(seed)))
        with mock.patch.object(windows, "deliver_part", deliver_by_itself):
            alone = asyncio.run(play(Scenario(seed)))
    assert together == alone
    assert together["counts"][0] == sum(Scenario(seed).counts)
