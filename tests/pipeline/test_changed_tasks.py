"""Tasks and results cannot be changed: what a handler created is what runs, is shown and is recorded."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.pipeline.conftest import P0, Rig, message
from tests.pipeline.recording.test_recorder import end

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import (
    DeliveryError,
    ErrorAction,
    ErrorKind,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    MessageGroup,
    PrecomputedResult,
)
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.beats import Beat
from tidemill.sinks.payloads import CollectResult

MakeRig = Callable[..., Rig]

TASK = ExecutorTask("t", ["-c"], {"own": 1}, [7], env={"A": "1"}, labels={"n": "1"})
VALUES = [
    TASK,
    PrecomputedResult("known"),
    ExecutorResult(0, b"", "", 0.1, TASK, 1),
    ExecutorError(TASK, 3, "", None, 1, ErrorKind.EXIT),
    DeliveryError("files", "filesystem", "no", [], 1),
    MessageGroup(SourceMessage("t", 0, 0)),
    CollectResult(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_no_attribute_can_be_set_or_removed(value: msgspec.Struct) -> None:
    for name in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, None)
        with pytest.raises(AttributeError):
            delattr(value, name)


def test_the_error_says_how_to_get_a_changed_task() -> None:
    with pytest.raises(AttributeError) as raised:
        TASK.args = ()
    assert "msgspec.structs.replace" in str(raised.value)
    with pytest.raises(TypeError) as unchanged:
        TASK.labels["n"] = "2"  # type: ignore[index]
    assert "msgspec.structs.replace" in str(unchanged.value)


CHANGES: list[Callable[[Any], Any]] = [
    lambda texts: texts.__setitem__("n", "2"),
    lambda texts: texts.__delitem__("n"),
    lambda texts: texts.clear(),
    lambda texts: texts.pop("n"),
    lambda texts: texts.popitem(),
    lambda texts: texts.setdefault("m", "2"),
    lambda texts: texts.update(n="2"),
    lambda texts: texts.__ior__({"n": "2"}),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("task", [TASK, ExecutorTask("without")], ids=["some", "none"])
def test_env_and_labels_cannot_be_changed(task: ExecutorTask, change: Callable[[Any], Any]) -> None:
    for texts in (task.env, task.labels):
        with pytest.raises(TypeError):
            change(texts)


def test_a_changed_copy_is_checked_and_leaves_the_task_alone() -> None:
    changed = msgspec.structs.replace(TASK, args=["-x"], labels={**TASK.labels, "m": "2"})
    assert (changed.args, changed.labels) == (("-x",), {"n": "1", "m": "2"})
    assert (TASK.args, TASK.labels) == (("-c",), {"n": "1"})
    with pytest.raises(TypeError):
        msgspec.structs.replace(TASK, stdin=7)
    with pytest.raises(TypeError):
        changed.labels["n"] = "3"  # type: ignore[index]


def test_a_task_can_be_copied_pickled_and_encoded() -> None:
    for same in (copy.copy(TASK), copy.deepcopy(TASK), pickle.loads(pickle.dumps(TASK))):
        assert same == TASK
        with pytest.raises(TypeError):
            same.labels["n"] = "2"
    assert json.loads(json.dumps(TASK.labels)) == msgspec.json.decode(msgspec.json.encode(TASK))["labels"] == {"n": "1"}


def test_lists_and_mappings_that_change_after_the_task_was_created_change_nothing() -> None:
    args, offsets, env, labels = ["-c"], [7], {"A": "1"}, {"n": "1"}
    task = ExecutorTask("t", args, {}, offsets, env=env, labels=labels)
    for each in (args, offsets, env, labels):
        each.clear()  # type: ignore[attr-defined]
    assert (task.args, task.source_offsets, task.env, task.labels) == (("-c",), (7,), {"A": "1"}, {"n": "1"})


def test_metadata_is_the_handlers_own() -> None:
    metadata = {"tries": 0}
    task = ExecutorTask("t", metadata=metadata)
    task.metadata["tries"] += 1
    assert metadata == {"tries": 1}


class Changes(Handler[Any, Any]):
    """Tries to change every task and result that it sees; the messages' hooks raise because of it."""

    def __init__(self, fails: bool, known: bool) -> None:
        self.fails, self.known = fails, known
        self.labels: dict[str, str] = {}
        self.args: list[str] = []
        self.offsets: list[int] = []
        self.refused = 0

    def _change(self, *tasks: ExecutorTask) -> None:
        for task in tasks:
            for name, value in (("task_id", "changed"), ("args", ()), ("stdin", b"changed"), ("labels", {})):
                try:
                    setattr(task, name, value)
                except AttributeError:
                    self.refused += 1
            try:
                task.labels["n"] = "changed"  # type: ignore[index]
            except TypeError:
                self.refused += 1

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        self._change(*pending.pending_tasks)
        tasks = []
        for m in messages:
            self.args[:] = ["-c", f"echo {m.offset}; exit {3 if self.fails else 0}"]
            self.labels["n"], self.offsets[:] = str(m.offset), [m.offset]
            precomputed = PrecomputedResult(str(m.offset)) if self.known else None
            tasks.append(
                ExecutorTask(
                    f"t{m.offset}",
                    self.args,
                    source_offsets=self.offsets,
                    labels=self.labels,
                    precomputed=precomputed,
                )
            )
        self.args[:], self.offsets[:] = ["--never-ran"], [-1]
        self.labels.clear()
        return tasks

    async def on_task_complete(self, result: ExecutorResult) -> None:
        self._change(result.task)
        with pytest.raises(AttributeError):
            result.stdout_bytes = b"changed"

    async def on_message_complete(self, group: MessageGroup) -> None:
        self._change(*group.tasks)
        with pytest.raises(AttributeError):
            group.results = []

    async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction:
        self._change(task, error.task)
        return ErrorAction.RETRY


@pytest.mark.parametrize("order_by", ["none", "key"])
@pytest.mark.parametrize("ends", ["ok", "fails", "known"])
async def test_what_was_created_is_what_runs_is_shown_and_is_recorded(rig: MakeRig, ends: str, order_by: str) -> None:
    fails, known = ends == "fails", ends == "known"
    handler = Changes(fails, known)
    executor = {
        "binary_path": "/bin/sh",
        "window_size": 2,
        "max_executors": 2,
        "max_retries": 1,
        "retry_backoff": {"initial_seconds": 0.001},
        "order_by": order_by,
    }
    messages = [SourceMessage("t", 0, n, b"k%d" % (n % 2), b"x") for n in range(6)]
    it = rig(handler, messages, debug={"store_output": True, "output_min_duration_ms": 0}, executor=executor)
    await look_until_committed(it, 6)
    assert handler.refused
    code = 3 if fails else 0
    letters = sorted((letter.task_id, *letter.args) for letter in it.letters.letters)
    assert letters == ([(f"t{n}", "-c", f"echo {n}; exit {code}") for n in range(6)] if fails else [])
    recorded = await end(it)
    assert [row["offset"] for row in sorted(recorded.messages, key=lambda row: row["offset"])] == [*range(6)]
    rows = sorted((row["task_id"], row["offsets"], row["args"], row["labels"], row["stdout"]) for row in recorded.tasks)
    assert rows == sorted(
        (f"t{n}", [n], ["-c", f"echo {n}; exit {code}"], [("n", str(n))], None if known else b"%d\n" % n)
        for n in range(6)
        for _ in range(2 if fails else 1)
    )


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


class Replaces(Handler[Any, Any]):
    """Replaces a failed task by a changed copy of it, or by the task itself."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [ExecutorTask("t", ["-c", "exit 3"], binary_path="/bin/sh")]

    async def on_error(self, task: ExecutorTask, error: ExecutorError) -> list[ExecutorTask]:
        return [msgspec.structs.replace(task, **self.changes) if self.changes else task]


async def test_a_changed_copy_of_a_failed_task_replaces_it(rig: MakeRig) -> None:
    it = rig(Replaces(args=["-c", "true"]), [message(0)], debug={})
    await it.committed(1)
    rows = sorted((row["args"][1], row["parent"], row["kind"]) for row in (await end(it)).tasks)
    assert rows == [("exit 3", None, "exit"), ("true", "t", "ok")]


async def test_a_task_that_replaces_itself_has_itself_as_parent_from_then_on(rig: MakeRig) -> None:
    it = rig(Replaces(), [message(0)], debug={}, executor={"max_replacements": 2})
    await it.committed(1)
    assert sorted(str(row["parent"]) for row in (await end(it)).tasks) == ["None", "t", "t"]


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
