"""What handlers get besides hooks, in running engines: periodic hooks, cache, threads, and the watch over the loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import re
import threading
import time
from typing import Any

import pytest
import structlog
from tests.pipeline.conftest import message
from tests.until import until

from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.pipeline.handler.periodic import PeriodicRunner, periodic
from tidemill.runtime.link.progress import StopReason


class Quiet(Handler[Any, Any]):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult()) for m in messages
        ]


# -- periodic -----------------------------------------------------------------------------------------------------


class Ticking(Quiet):
    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.running = 0
        self.most = 0
        self.fail = False

    @periodic(0.02)
    async def tick(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.ticks.append(time.monotonic())
        try:
            await asyncio.sleep(0.05)
            if self.fail:
                raise ValueError("no rates today")
        finally:
            self.running -= 1


async def test_a_periodic_hook_sleeps_first_never_overlaps_and_is_cancelled_at_the_stop(rig):
    handler = Ticking()
    started = time.monotonic()
    run = rig(handler, [])
    await run.until(lambda: len(handler.ticks) >= 4)
    assert handler.ticks[0] - started >= 0.02
    assert handler.most == 1
    assert min(b - a for a, b in zip(handler.ticks, handler.ticks[1:], strict=False)) >= 0.07
    await run.until(lambda: handler.running)
    summary = await run.end()
    assert handler.running == 0
    count = len(handler.ticks)
    assert summary.progress.periodic_runs == count
    assert summary.progress.periodic_errors == 0
    await asyncio.sleep(0.1)
    assert len(handler.ticks) == count


async def test_after_an_exception_it_is_logged_and_continues(rig):
    handler = Ticking()
    handler.fail = True
    with structlog.testing.capture_logs() as logs:
        run = rig(handler, [])
        await run.until(lambda: len(handler.ticks) >= 3)
        summary = await run.end()
    raised = [entry for entry in logs if entry["event"] == "a periodic hook raised"]
    assert len(raised) >= 2
    assert raised[0]["hook"] == "tick"
    assert raised[0]["exc_info"]
    assert summary.progress.periodic_errors >= 2
    assert summary.reason is StopReason.DRAINED


class Once(Quiet):
    def __init__(self) -> None:
        self.ran = 0

    @periodic(0.01, on_error="stop")
    async def refresh(self) -> None:
        self.ran += 1
        raise SystemExit(3)


async def test_with_on_error_stop_it_stops_for_good_and_the_engine_says_so(rig):
    handler = Once()
    run = rig(handler, [message(0)])
    await run.until(lambda: "periodic refresh" in run.engine.progress().waits)
    await asyncio.sleep(0.1)
    assert handler.ran == 1
    assert "sys.exit(3)" in run.engine.progress().waits["periodic refresh"]
    await run.committed(1)
    assert (await run.end()).reason is StopReason.DRAINED


class Scoped(Quiet):
    def __init__(self) -> None:
        self.ran: list[str] = []

    @periodic(0.01, scope="pipeline")
    async def everywhere_once(self) -> None:
        self.ran.append("pipeline")

    @periodic(0.01, scope="engine")
    async def everywhere(self) -> None:
        self.ran.append("engine")


@pytest.mark.parametrize(("slot", "ran"), [(0, {"engine", "pipeline"}), (1, {"engine"})])
async def test_the_scope_pipeline_runs_in_slot_0_only(slot, ran):
    handler = Scoped()
    runner = PeriodicRunner(handler, slot)
    runner.start()
    await until(lambda: runner.statistics().runs >= 10)
    await runner.stop()
    assert set(handler.ran) == ran


class Stubborn(Quiet):
    @periodic(0.001)
    async def never(self) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if self.let_go:
                    raise


async def test_a_periodic_hook_that_does_not_let_itself_be_cancelled_does_not_hold_the_stop(rig, monkeypatch):
    monkeypatch.setattr("tidemill.pipeline.handler.periodic.CANCEL_SECONDS", 0.1)
    handler = Stubborn()
    handler.let_go = False
    run = rig(handler, [])
    await run.until(lambda: run.engine.progress().periodic_runs)
    with structlog.testing.capture_logs() as logs:
        assert (await run.end()).reason is StopReason.DRAINED
    assert any(entry.get("hooks") == ["periodic never"] for entry in logs)
    handler.let_go = True
    await run.engine.services.stop_periodic()


def test_a_subclass_may_override_and_so_undeclare_a_periodic_hook():
    class Still(Ticking):
        async def tick(self) -> None:
            pass

    assert PeriodicRunner(Still(), 0)._hooks == {}
    assert list(PeriodicRunner(Ticking(), 0)._hooks) == ["tick"]


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: periodic(lambda self: None), r"write @periodic\(60\)"),
        (lambda: periodic(0), "positive number of seconds, not 0"),
        (lambda: periodic("60"), "positive number"),
        (lambda: periodic(True), "positive number"),
        (lambda: periodic(float("inf")), "positive number"),
        (lambda: periodic(1, on_error="ignore"), "on_error must be 'continue' or 'stop', not 'ignore'"),
        (lambda: periodic(1, scope=["slot"]), "scope must be 'engine' or 'pipeline'"),
        (lambda: periodic(1)(lambda self: None), "must be an async def"),
        (lambda: periodic(1)(needs_more), "needs_more must take no arguments"),
    ],
)
def test_wrong_arguments_are_refused_by_name(declare, text):
    with pytest.raises(HandlerError, match=text):
        declare()


async def needs_more(self, what):
    pass


# -- offload ------------------------------------------------------------------------------------------------------

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


class Blocking(Quiet):
    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.together = 0
        self.most = 0
        self.found: list[Any] = []
        self.lock = threading.Lock()

    def work(self, number: int, *, seconds: float) -> int:
        with self.lock:
            self.together += 1
            self.most = max(self.most, self.together)
            self.threads.add(threading.current_thread().name)
        time.sleep(seconds)
        with self.lock:
            self.together -= 1
        return number * 2

    async def on_message_complete(self, group):
        self.found.append(await self.offload(self.work, group.source_message.offset, seconds=0.05))


async def test_blocking_calls_run_in_as_many_threads_as_are_allowed_and_the_loop_continues(rig):
    handler = Blocking()
    run = rig(handler, [message(n) for n in range(12)], executor={"offload_threads": 3})
    await run.committed(12)
    assert sorted(handler.found) == list(range(0, 24, 2))
    assert handler.most == 3
    assert all(name.startswith("tidemill-offload") for name in handler.threads)
    await run.end()
    assert await handler.offload(handler.work, 4, seconds=0) == 8, "without an engine it works too"


async def test_errors_and_context_pass_through_an_offloaded_call(rig):
    handler = Blocking()
    run = rig(handler, [])
    await run.until(lambda: "_offload" in handler.__dict__)
    WHO.set("me")
    assert await handler.offload(WHO.get) == "me"
    with pytest.raises(ZeroDivisionError):
        await handler.offload(lambda: 1 / 0)
    with pytest.raises(HandlerError, match="StopIteration"):
        await asyncio.wait_for(handler.offload(next, iter(())), 30)
    await run.end()
    assert "_offload" not in handler.__dict__


# -- cache --------------------------------------------------------------------------------------------------------


class Counting(Quiet):
    async def on_ready(self, config, sinks):
        self.at_start = await self.cache.get("count", 0)

    async def on_message_complete(self, group):
        self.cache.set("count", await self.cache.get("count", 0) + 1)

    async def on_revoke(self, partitions):
        self.cache.set("revoked", True)


async def test_the_cache_of_a_slot_is_there_for_every_hook_and_its_next_engine(rig, tmp_path):
    config = {"cache": {"enabled": True, "path": str(tmp_path)}}
    handler = Counting()
    run = rig(handler, [message(n) for n in range(3)], **config)
    await run.committed(3)
    summary = await run.end()
    assert (handler.at_start, summary.progress.cache_hits, summary.progress.cache_misses) == (0, 2, 2)
    assert summary.progress.cache_entries == 2
    assert [path.name for path in tmp_path.iterdir()] == ["g.test.0-cache.db"]
    with pytest.raises(HandlerError, match=r"cache\.enabled"):
        handler.cache.peek("count")

    again = Counting()
    run = rig(again, [message(3)], **config)
    await run.committed(4)
    assert again.at_start == 3
    assert again.cache.peek("count") == 4
    assert again.cache.peek("revoked") is True
    await run.end()


async def test_an_engine_without_a_cache_stops_silently(rig):
    with structlog.testing.capture_logs() as logs:
        run = rig(Quiet(), [message(0)])
        await run.committed(1)
        await run.end()
    assert not [entry for entry in logs if entry["log_level"] in ("warning", "error")]


async def test_a_disk_that_refuses_the_cache_shows_in_the_progress(rig, tmp_path):
    (tmp_path / "file").write_text("")
    run = rig(Counting(), [message(0)], cache={"enabled": True, "path": str(tmp_path / "file")})
    await run.committed(1)
    assert "continuing in memory only" in run.engine.progress().waits["cache"]
    assert (await run.end()).reason is StopReason.DRAINED


async def test_a_handler_with_a_cache_of_its_own_keeps_it_or_is_told_to_rename_it(rig, tmp_path):
    class Own(Quiet):
        def __init__(self) -> None:
            self.cache = {"mine": 1}

    handler = Own()
    run = rig(handler, [message(0)])
    await run.committed(1)
    await run.end()
    assert handler.cache == {"mine": 1}
    run = rig(Own(), [], cache={"enabled": True, "path": str(tmp_path)})
    summary = await asyncio.wait_for(run._task, 30)
    assert summary.reason is StopReason.FAILED
    assert "Own has an attribute 'cache' of its own" in summary.error


# -- the watch over the loop --------------------------------------------------------------------------------------


def layered(method):
    @functools.wraps(method)
    async def layer(*args):
        return await method(*args)

    return layer


class Sleepy(Quiet):
    """Blocks the loop until the watch has noticed, which takes long on a busy machine."""

    def __init__(self, logs):
        self._logs = logs

    def deserialize_message(self, message):
        if message.value == b"slow to read":
            self._sleep()
        return message.value

    @layered
    async def on_message_complete(self, group):
        if group.source_message.value == b"slow at the end":
            self._sleep()

    def _sleep(self):
        begun = len(self._logs)
        for _ in range(300):
            time.sleep(0.1)
            if any("time.sleep" in entry.get("stack", "") for entry in self._logs[begun:]):
                return


class Greedy(Quiet):
    """Keeps the interpreter to itself: no other thread runs meanwhile."""

    async def on_message_complete(self, group):
        if group.source_message.value == b"greedy":
            re.match(r"(a+)+$", "a" * 24 + "b")


async def start_watched(run, logs):
    """Wait until the start is over and the watch has seen that; return how many entries the log has by then.

    On a busy machine the start takes longer than the limit of these tests, and would be one block with what follows it.
    """
    await run.committed(1)
    await asyncio.sleep(0.1)  # four of its pulses
    return len(logs)


async def test_a_hook_that_keeps_the_interpreter_to_itself_is_named_when_it_is_over(rig):
    with structlog.testing.capture_logs() as logs:
        run = rig(Greedy(), [message(0)], executor={"block_seconds": 0.1})
        before = await start_watched(run, logs)
        run.source.feed(message(1, b"greedy"), message(2))
        await run.committed(3)
        await run.until(lambda: [entry for entry in logs[before:] if is_over(entry) and entry["hook"]])
        await run.end()
    blocks = [entry for entry in logs[before:] if "blocks the event loop" in entry["event"]]
    assert "on_message_complete" in {block["hook"] for block in blocks}


def is_over(entry):
    return entry["event"] == "the event loop is running again"


@pytest.mark.parametrize(
    ("value", "hook"), [(b"slow to read", "deserialize_message"), (b"slow at the end", "on_message_complete")]
)
async def test_a_hook_that_blocks_the_loop_is_named_with_its_stack(rig, value, hook):
    with structlog.testing.capture_logs() as logs:
        run = rig(Sleepy(logs), [message(0)], executor={"block_seconds": 0.1})
        before = await start_watched(run, logs)
        run.source.feed(message(1, value), message(2))
        await run.committed(3)
        await run.until(lambda: [entry for entry in logs[before:] if is_over(entry) and entry["hook"] == hook])
        summary = await run.end()
    blocks = [entry for entry in logs if "blocks the event loop" in entry["event"]]
    (block,) = [entry for entry in blocks if "time.sleep" in entry["stack"]]
    assert block["hook"] == hook
    assert "self.offload" in block["event"]
    assert summary.progress.loop_blocks == len(blocks)
    over = next(entry for entry in logs[logs.index(block) :] if is_over(entry))
    assert over["hook"] == hook
    assert over["seconds"] >= block["seconds"]


async def test_what_is_not_a_hook_is_reported_as_such_and_0_seconds_watch_nothing(rig):
    with structlog.testing.capture_logs() as logs:
        run = rig(Quiet(), [message(0)], executor={"block_seconds": 0.1})
        await run.committed(1)
        before = len(logs)  # on a busy machine hooks of this one may have blocked, too
        time.sleep(0.4)  # the test itself
        await run.until(lambda: [entry for entry in logs[before:] if "blocks the event loop" in entry["event"]])
        await run.end()
        blind = rig(Quiet(), [message(0)], executor={"block_seconds": 0})
        await blind.committed(1)
        time.sleep(0.2)
        assert (await blind.end()).progress.loop_blocks == 0
    block = next(entry for entry in logs[before:] if "blocks the event loop" in entry["event"])
    assert block["hook"] is None


def test_a_handler_with_services_still_travels():
    from tidemill.spark.session.packaging import pack_handler

    assert pack_handler(Ticking())
