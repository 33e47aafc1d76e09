"""What a hook does to a task that waits or runs: what ran is what is recorded, and a task that makes no sense fails."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.pipeline.conftest import Rig, message
from tests.pipeline.recording.test_recorder import end

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult

MakeRig = Callable[..., Rig]

BACKOFF = {"initial_seconds": 0.001}
#: What a careless hook may put into a task.
SPOILED: list[tuple[str, Any]] = [
    ("task_id", 7),
    ("task_id", None),
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


class Spoils(Handler[Any, Any]):
    """Puts something into all tasks that it knows, whenever it can."""

    def __init__(self, name: str, value: Any, fails: bool) -> None:
        self.name, self.value, self.fails = name, value, fails
        self.known: list[ExecutorTask] = []

    def _spoil(self) -> None:
        for task in self.known:
            setattr(task, self.name, self.value)

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        self._spoil()
        command = "sleep 0.05; exit 3" if self.fails else "sleep 0.05"
        tasks = [
            ExecutorTask(f"t{m.offset}", ["-c", command], source_offsets=[m.offset], labels={"n": str(m.offset)})
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
    await it.committed(6)
    offsets = sorted(source.offset for letter in it.letters.letters for source in letter.sources)
    assert offsets == (list(range(6)) if fails else offsets)
    if recorded:
        recorded_rows = await end(it)
        assert sorted(row["offset"] for row in recorded_rows.messages) == list(range(6))
        ran = [row for row in recorded_rows.tasks if row["pid"] is not None and name != "args"]
        assert {tuple(row["args"]) for row in ran} <= {("-c", "sleep 0.05; exit 3"), ("-c", "sleep 0.05")}


class Changes(Handler[Any, Any]):
    """Changes each task while it runs, and when it has ended."""

    def __init__(self, **options: Any) -> None:
        self.options, self.known = options, list[ExecutorTask]()

    def _change(self) -> None:
        for task in self.known:
            task.task_id, task.labels, task.parent_task_id = "changed", {"never": "was"}, "nobody"
            task.precomputed = PrecomputedResult("never")
            if isinstance(task.args, list):
                task.args[:] = ["--never-ran"]
            else:
                task.args = ("--never-ran",)

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        await asyncio.sleep(0.1)  # until then those before have started
        self._change()
        tasks = [
            ExecutorTask(f"t{m.offset}", source_offsets=[m.offset], **copy.deepcopy(self.options)) for m in messages
        ]
        self.known += tasks
        return tasks

    async def on_task_complete(self, result: Any) -> None:
        self._change()

    async def on_message_complete(self, group: Any) -> None:
        self._change()


BARE = {"binary_path": "/bin/true"}
LABELLED = {"binary_path": "/bin/sh", "args": ["-c", "sleep 0.3"], "labels": {"n": "1"}}


@pytest.mark.parametrize("options", [BARE, LABELLED])
async def test_rows_are_of_what_ran_whatever_hooks_make_of_tasks(rig: MakeRig, options: dict[str, Any]) -> None:
    expected = list(options.get("args", [])), [*options.get("labels", {}).items()]
    it = rig(Changes(**options), [message(n) for n in range(4)], debug={}, executor={"window_size": 1})
    await it.committed(4)
    recorded = await end(it)
    assert [row["precomputed"] for row in recorded.messages] == [0] * 4
    assert sorted((row["task_id"], row["parent"], row["kind"]) for row in recorded.tasks) == [
        (f"t{n}", None, "ok") for n in range(4)
    ]
    assert [(row["args"], row["labels"]) for row in recorded.tasks] == [expected] * 4
