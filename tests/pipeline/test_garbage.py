"""What a message leaves behind: nothing that only a search for cycles would find, which costs an engine time."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.pipeline.conftest import P0, message

from tidemill.pipeline import hooks
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.sinks.payloads import CollectResult, FilePayload

#: Of this many messages in a row.
MESSAGES = 200
_ECHO = "import sys, os\nfor line in sys.stdin.buffer: os.write(1, line)"


class Work(Handler[Any, Any]):
    """A task per message, which some hook delivers."""

    def __init__(self, **task: Any) -> None:
        self.task = task

    async def arrange(self, messages, pending):
        return [ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), **self.task) for m in messages]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out", data=b"line")])


class Hooked(Work):
    """All hooks deliver."""

    async def on_message_complete(self, group):
        return CollectResult(files=[FilePayload(path="out", data=b"message")])

    async def on_window_complete(self, results, messages):
        return CollectResult(files=[FilePayload(path="out", data=b"window")])


class Lines(Handler[Any, Any]):
    """A line per message, without tasks."""

    async def transform(self, messages):
        return [FilePayload(path="out", data=b"line") for _ in messages]


KNOWN = {"precomputed": PrecomputedResult("ok")}


@pytest.fixture
def _searched_by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize(
    ("handler", "config"),
    [
        pytest.param(Work(**KNOWN), {}, id="known results"),
        pytest.param(Work(**KNOWN), {"debug": {}}, id="recorded"),
        pytest.param(Hooked(**KNOWN), {}, id="all hooks"),
        pytest.param(Work(**KNOWN), {"executor": {"order_by": "key"}}, id="in the order of keys"),
        pytest.param(Work(**KNOWN), {"executor": {"commit": "window"}}, id="committed by window"),
        pytest.param(Work(args=("-c", "exit 0")), {"executor": {"binary_path": "/bin/sh"}}, id="processes"),
        pytest.param(
            Work(args=("-c", "exit 1")),
            {"executor": {"binary_path": "/bin/sh", "max_retries": 1, "retry_backoff": {"initial_seconds": 0.01}}},
            id="failures and retries",
        ),
        pytest.param(Lines(), {}, id="transform"),
    ],
)
@pytest.mark.usefixtures("_searched_by_hand")
async def test_what_a_message_leaves_behind_is_freed_without_a_search(
    rig: Any, handler: Handler[Any, Any], config: dict[str, Any]
) -> None:
    count = MESSAGES if "binary_path" not in config.get("executor", {}) else MESSAGES // 10
    run = rig(handler, [message(offset) for offset in range(count)], **config)
    await run.committed(count)
    run.source.feed(*(message(offset) for offset in range(count, count + 1)))
    await run.committed(count + 1)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    run.source.feed(*(message(offset) for offset in range(count + 1, 2 * count)))
    await run.committed(2 * count)
    gc.collect()
    left = Counter(type(each).__qualname__ for each in gc.garbage)
    assert sum(left.values()) < count / 4, left.most_common(20)


class Waits(Work):
    """Its hook of messages waits."""

    def __init__(self) -> None:
        super().__init__(args=("-c", "exit 0"))
        self.gate = asyncio.Event()

    async def on_message_complete(self, group):
        await self.gate.wait()


@pytest.mark.usefixtures("_searched_by_hand")
async def test_a_window_of_a_partition_that_is_given_up_is_freed_without_a_search(rig: Any) -> None:
    handler = Waits()
    run = rig(handler, [message(offset) for offset in range(4)], executor={"binary_path": "/bin/sh"})
    await run.until(lambda: run.engine.counters.tasks_done == 4)
    await run.settled()
    run.source.lose(P0)
    await run.settled()
    handler.gate.set()
    await run.settled()
    hooks.latest[0] = None  # whoever blocks the loop is named by it
    windows = [each for each in gc.get_objects() if type(each) is WindowInFlight]
    assert not [each for each in windows if each.context is run.engine.context]
