"""What a hook does to a task that waits or runs: what ran is what is recorded, and a task that makes no sense fails."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.pipeline.conftest import P0, Rig, message
from tests.pipeline.recording.test_recorder import end

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.beats import Beat

MakeRig = Callable[..., Rig]

BACKOFF = {"initial_seconds": 0.001}
#: What a careless hook may put into a task.
SPOILED: list[tuple[str, Any]] = [
    ("task_id", 7),
    ("task_id", None),
    ("task_id", b"bytes"),
    ("args", 5),
    ("args", None),
    ("args", [3, None]),
    ("metadata", None),
    ("source_offsets", None),
    ("source_offsets", ["x"]),
    ("binary_path", 9),
    ("stdin", 5),
    ("stdin", "\ud800"),
    ("env", 5),
    ("env", {"A": 3}),
    ("timeout_seconds", "soon"),
    ("precomputed", 5),
    ("labels", None),
    ("labels", {"a": object()}),
    ("labels", 3),
    ("parent_task_id", 3),
]


#: Of these, what no program needs.
HARMLESS = ("task_id", "metadata", "source_offsets", "labels", "parent_task_id")


class Spoils(Handler[Any, Any]):
    """Puts something into all tasks that it knows, whenever it can."""

    def __init__(self, name: str, value: Any, fails: bool = False, known: bool = False) -> None:
        self.name, self.value, self.fails, self.is_known = name, value, fails, known
        self.known: list[ExecutorTask] = []

    def _spoil(self) -> None:
        for task in self.known:
            setattr(task, self.name, self.value)

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        self._spoil()
        command = "sleep 0.05; exit 3" if self.fails else "sleep 0.05"
        tasks = [
            ExecutorTask(
                f"t{m.offset}",
                ["-c", command],
                source_offsets=[m.offset],
                labels={"n": str(m.offset)},
                precomputed=PrecomputedResult("known") if self.is_known and m.offset else None,
            )
            for m in messages
        ]
        self.known += tasks
        return tasks

    async def on_task_complete(self, result: Any) -> None:
        self._spoil()

    async def on_message_complete(self, group: Any) -> None:
        self._spoil()

    async def on_error(self, task: Any, error: Any) -> ErrorAction:
        self._spoil()
        return ErrorAction.RETRY


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("name", "value"), SPOILED)
async def test_whatever_a_hook_puts_into_a_task_its_message_leaves(
    rig: MakeRig, name: str, value: Any, recorded: bool, fails: bool
) -> None:
    it = rig(
        Spoils(name, value, fails),
        [message(n) for n in range(6)],
        debug={} if recorded else {"enabled": False},
        executor={
            "binary_path": "/bin/sh",
            "window_size": 2,
            "max_executors": 2,
            "max_retries": 1,
            "retry_backoff": BACKOFF,
        },
    )
    await look_until_committed(it, 6)
    if fails:
        assert find_lettered(it) == list(range(6))
    if recorded:
        recorded_rows = await end(it)
        assert sorted(row["offset"] for row in recorded_rows.messages) == list(range(6))
        ran = {tuple(row["args"]) for row in recorded_rows.tasks if row["pid"] is not None}
        assert name == "args" or ran <= {("-c", "sleep 0.05; exit 3" if fails else "sleep 0.05")}
        assert ran or name not in HARMLESS


@pytest.mark.parametrize(("name", "value"), [*SPOILED, ("precomputed", PrecomputedResult(5, exit_code="x"))])  # type: ignore[arg-type]
@pytest.mark.parametrize("known", [False, True])
async def test_a_task_that_is_spoilt_while_it_waits_for_its_key_holds_up_nothing(
    rig: MakeRig, name: str, value: Any, known: bool
) -> None:
    messages = [SourceMessage("t", 0, n, b"k", b"x") for n in range(4)]
    executor = {"binary_path": "/bin/sh", "order_by": "key", "max_retries": 0}
    it = rig(Spoils(name, value, known=known), messages, debug={}, executor=executor)
    await look_until_committed(it, 4)
    assert sorted(row["offset"] for row in (await end(it)).messages) == list(range(4))
    if name == "precomputed":
        assert find_lettered(it) == [1, 2, 3]
        assert all("cannot be started: precomputed" in letter.error for letter in it.letters.letters)


async def look_until_committed(it: Rig, count: int) -> None:
    """Send beats, and show the live page and where messages are, until so many are committed."""
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Beat)
    while it.source.committed.get(P0) != count:
        decoder.decode(encoder.encode(it.engine.beat(whole=True)))
        for offset in range(count):
            it.engine.find_message(*P0, offset)
        if it.engine.live is not None:
            it.engine.live.renew(60.0)
            it.engine.live.take_state()
        await asyncio.sleep(0.02)
    await it.committed(count)


def find_lettered(it: Rig) -> list[int]:
    """Return the offsets of dead-lettered messages."""
    return sorted(source.offset for letter in it.letters.letters for source in letter.sources)


class Changes(Handler[Any, Any]):
    """Changes tasks while they run, and when they have ended."""

    pool: TaskPool

    def __init__(self, **options: Any) -> None:
        self.options = options

    def _change(self, *ended: ExecutorTask) -> None:
        for task in (*ended, *(run.task for run in self.pool._running)):
            task.task_id, task.labels, task.parent_task_id = "changed", {"never": "was"}, "nobody"
            task.precomputed = PrecomputedResult("never")
            if isinstance(task.args, list):
                task.args[:] = ["--never-ran"]
            else:
                task.args = ("--never-ran",)

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        self._change()
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=[m.offset], **copy.deepcopy(self.options)) for m in messages
        ]

    async def on_task_complete(self, result: Any) -> None:
        self._change(result.task)

    async def on_message_complete(self, group: Any) -> None:
        self._change(*group.tasks)


BARE = {"binary_path": "/bin/true"}
LABELLED = {"binary_path": "/bin/sh", "args": ["-c", "sleep 0.3"], "labels": {"n": "1"}}


@pytest.mark.parametrize("options", [BARE, LABELLED])
async def test_rows_are_of_what_ran_whatever_hooks_make_of_tasks(rig: MakeRig, options: dict[str, Any]) -> None:
    expected = list(options.get("args", [])), [*options.get("labels", {}).items()]
    handler = Changes(**options)
    it = rig(handler, [message(n) for n in range(4)], debug={}, executor={"window_size": 1})
    handler.pool = it.engine.context.pool
    await it.committed(4)
    recorded = await end(it)
    assert [row["precomputed"] for row in recorded.messages] == [0] * 4
    assert sorted((row["task_id"], row["parent"], row["kind"]) for row in recorded.tasks) == [
        (f"t{n}", None, "ok") for n in range(4)
    ]
    assert [(row["args"], row["labels"]) for row in recorded.tasks] == [expected] * 4


class Words(str):
    """A text of a type of its own, as numpy has one."""

    __slots__ = ()


class Named(Handler[Any, Any]):
    """Names its tasks by such texts."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(Words(f"t{m.offset}"), [Words("-c"), Words("sleep 0.1")], labels={Words("n"): Words("1")})
            for m in messages
        ]


async def test_ids_of_a_text_type_of_their_own_are_sent_and_recorded(rig: MakeRig) -> None:
    it = rig(Named(), [message(n) for n in range(3)], debug={}, executor={"binary_path": "/bin/sh", "window_size": 1})
    await look_until_committed(it, 3)
    assert {name for _, name, _ in it.engine.progress().slowest} == {"t0", "t1", "t2"}
    rows = (await end(it)).tasks
    assert sorted((row["task_id"], row["args"], row["labels"]) for row in rows) == [
        (f"t{n}", ["-c", "sleep 0.1"], [("n", "1")]) for n in range(3)
    ]
