"""Hooks that never return, replacements without end, and how often equal failures are logged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tests.pipeline.conftest import message

from tidemill.pipeline import hooks
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.pipeline.handler.periodic import periodic
from tidemill.pipeline.hooks import HookCalls, call_hook
from tidemill.runtime.kafka.source_message import SourceMessage, span_messages
from tidemill.runtime.log import setup as log_module
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload


@pytest.fixture(autouse=True)
def _fresh_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits())


# -- hooks that do not return -------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_hook_is_stalled_from_ten_seconds_on_and_until_it_returns(now: list[float]) -> None:
    calls = HookCalls()
    calls.begun(1, "arrange", span_messages, [SourceMessage("t", 0, 17), SourceMessage("t", 0, 40)])
    now[0] += 9.9
    assert calls.describe_wait() == {}
    now[0] += 2.1
    assert calls.describe_wait() == {"arrange of t/0": "has not returned for 12 s (messages 17 to 40)"}
    calls.ended(1)
    assert calls.describe_wait() == {}


def test_of_many_calls_the_oldest_of_each_hook_and_partition_is_named(now: list[float]) -> None:
    calls = HookCalls()
    for key in range(5_000):
        calls.begun(key, "on_task_complete", span_messages, [SourceMessage("t", key % 40, key)])
    now[0] += 10
    calls.begun(5_000, "on_ready", hooks.locate_nowhere, None)
    now[0] += 5
    stalled = calls.describe_wait()
    assert stalled["on_task_complete of t/3"] == "has not returned for 15 s (message 3); and 24 more calls"
    assert len(stalled) == hooks.MAX_PLACES
    for key in range(5_000):
        calls.ended(key)
    now[0] += 5
    assert calls.describe_wait() == {"on_ready": "has not returned for 10 s"}


class Stuck(Handler[bytes, Any]):
    """Waits in one hook forever."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    async def _reach(self, hook: str) -> None:
        if hook == self.hook:
            await asyncio.Event().wait()

    async def on_ready(self, config, sinks):
        await self._reach("on_ready")

    async def on_assign(self, partitions):
        await self._reach("on_assign")

    async def arrange(self, messages, pending):
        await self._reach("arrange")
        program = "false" if self.hook == "on_error" else "true"
        return [ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), binary_path=program) for m in messages]

    async def on_task_complete(self, result):
        await self._reach("on_task_complete")
        return CollectResult(files=[FilePayload(path="out", data=1)])

    async def on_message_complete(self, group):
        await self._reach("on_message_complete")

    async def on_window_complete(self, results, messages):
        await self._reach("on_window_complete")

    async def on_error(self, task, error):
        await self._reach("on_error")
        return ErrorAction.SKIP

    async def on_delivery_error(self, error):
        await self._reach("on_delivery_error")

    @periodic(0.01)
    async def refresh(self) -> None:
        await self._reach("refresh")


@pytest.mark.parametrize(
    ("hook", "place", "messages"),
    [
        ("on_ready", "", ""),
        ("on_assign", " of t/0", ""),
        ("arrange", " of t/0", " (messages 5 to 7)"),
        ("on_task_complete", " of t/0", " (message 5)"),
        ("on_message_complete", " of t/0", " (message 5)"),
        ("on_window_complete", " of t/0", " (messages 5 to 7)"),
        ("on_error", " of t/0", " (message 5)"),
        ("on_delivery_error", " of t/0", " (message 5)"),
        ("refresh", "", ""),
    ],
)
async def test_a_hook_that_never_returns_is_named_with_partition_message_and_seconds(
    rig, monkeypatch, hook, place, messages
) -> None:
    monkeypatch.setattr(hooks, "HOOK_SECONDS", 0.1)
    run = rig(Stuck(hook), [message(offset) for offset in (5, 6, 7)], executor={"max_executors": 1})
    if hook == "on_delivery_error":
        run.files.refuse = lambda payload: Refusal("no", retryable=False)
    name = f"{hook}{place}"
    await run.until(lambda: name in run.engine.progress().waits)
    text = run.engine.progress().waits[name]
    assert text.startswith("has not returned for ")
    assert messages in text
    run.engine.settings.executor.drain_timeout_seconds = 0.1
    await run.end()
    assert hook in ("on_assign", "refresh", "on_window_complete") or not run.source.committed.get(("t", 0))


async def test_hooks_that_returned_are_forgotten_whatever_they_raised(rig) -> None:
    class Moody(Stuck):
        async def on_task_complete(self, result):
            await asyncio.sleep(0)
            raise SystemExit(3) if result.task.task_id == "t0" else ValueError(result.task.task_id)

    run = rig(Moody(""), [message(offset) for offset in range(3)])
    await run.committed(3)
    await run.until(lambda: not run.engine.context.hooks.calls._open)


async def test_what_cannot_be_awaited_is_named_and_the_hooks_own_errors_are_left_alone() -> None:
    async def generating():
        yield 1

    async def wrong() -> None:
        len(7)

    with pytest.raises(TypeError, match="arrange returned an async generator; it must be an `async def`"):
        await call_hook(generating(), name="arrange")
    with pytest.raises(TypeError, match="on_error returned a list"):
        await call_hook([], name="on_error")
    with pytest.raises(TypeError, match="has no len"):
        await call_hook(wrong(), name="arrange")


# -- replacements -------------------------------------------------------------------------------------------------


class Replacing(Handler[bytes, Any]):
    """Answers each failure with another task that fails."""

    def __init__(self) -> None:
        self.asked = 0

    async def arrange(self, messages, pending):
        return [ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), binary_path="false") for m in messages]

    async def on_error(self, task, error):
        self.asked += 1
        return [ExecutorTask(f"{task.task_id}+", binary_path="false")]


@pytest.mark.parametrize(("config", "most"), [({}, 10), ({"max_replacements": 2}, 2), ({"max_replacements": 0}, 0)])
async def test_a_task_that_is_replaced_again_and_again_is_dead_lettered_in_the_end(rig, config, most) -> None:
    handler = Replacing()
    run = rig(handler, [message(0)], executor=config)
    await run.committed(1)
    (letter,) = run.letters.letters
    assert handler.asked == most + 1
    assert letter.kind == "task"
    assert letter.task_id == "t0" + "+" * most
    assert letter.error == f"on_error has already replaced it {most} times (executor.max_replacements): exit code 1"
    assert run.engine.progress().tasks_failed == 1


# -- what is told -------------------------------------------------------------------------------------------------


class Telling(Handler[bytes, Any]):
    """Runs what the message says, as a shell does."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", ["-c", m.value], source_offsets=(m.offset,), binary_path="sh")
            for m in messages
        ]


def failures(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "a task failed for good"]


async def test_the_line_about_a_failed_task_has_the_end_of_its_stderr_masked_before_it_is_cut(rig) -> None:
    secret = "s3cret" * 80
    script = (
        f"printf '%9000d\\n' 1 | tr ' ' '.' >&2; echo 'login with password={secret} refused for user 7' >&2; exit 5"
    )
    with structlog.testing.capture_logs() as lines:
        run = rig(Telling(), [message(0, script.encode())], executor={"max_retries": 0})
        await run.committed(1)
    (line,) = failures(lines)
    assert line["stderr"].endswith("login with password=*** refused for user 7")
    assert len(line["stderr"]) == 500
    assert (line["kind"], line["exit_code"], line["exception"]) == ("exit", 5, None)
    (letter,) = run.letters.letters
    assert letter.error == line["stderr"]
    assert "s3cret" not in letter.stderr


async def test_a_secret_is_not_left_over_by_the_cut_of_a_letters_stderr(rig) -> None:
    script = f"printf 'token={'x' * 4090}' >&2; exit 5"
    run = rig(Telling(), [message(0, script.encode())], executor={"max_retries": 0})
    await run.committed(1)
    assert run.letters.letters[0].stderr == "token=***"


async def test_equal_failures_are_logged_once_and_different_ones_each(rig, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits(lambda: clock[0]))
    scripts = [b"echo no field %d >&2; exit 3" % n for n in range(20)] + [b"echo no disk >&2; exit 3", b"exit 4"]
    with structlog.testing.capture_logs() as lines:
        run = rig(Telling(), [message(n, script) for n, script in enumerate(scripts)], executor={"max_retries": 0})
        await run.committed(22)
        clock[0] += 10
        run.source.feed(message(22, scripts[0]))
        await run.committed(23)
    assert len(run.letters.letters) == 23, "every one has its letter"
    told = [(line["exit_code"], line["stderr"].rstrip("0123456789"), line.get("left_out")) for line in failures(lines)]
    assert sorted(told, key=str) == [
        (3, "no disk", None),
        (3, "no field ", 19),
        (3, "no field ", None),
        (4, "", None),
    ]


@pytest.mark.parametrize(
    "hook", ["arrange", "on_task_complete", "on_message_complete", "on_error", "on_delivery_error"]
)
async def test_what_a_hook_raises_for_every_message_is_logged_once(rig, hook) -> None:
    class Raising(Handler[bytes, Any]):
        async def arrange(self, messages, pending):
            if hook == "arrange":
                raise ValueError(f"no field {messages[0].offset}")
            known = None if hook == "on_error" else PrecomputedResult()
            return [
                ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=known, binary_path="false")
                for m in messages
            ]

        async def on_task_complete(self, result):
            if hook == "on_task_complete":
                raise ValueError(f"no field {result.task.task_id}")
            return CollectResult(files=[FilePayload(path="out", data=1)])

        async def on_message_complete(self, group):
            if hook == "on_message_complete":
                raise ValueError(f"no field {group.source_message.offset}")

        async def on_error(self, task, error):
            raise ValueError(f"no field {task.task_id}")

        async def on_delivery_error(self, error):
            raise ValueError(f"no field {error.payloads}")

    with structlog.testing.capture_logs() as lines:
        run = rig(Raising(), [message(n) for n in range(20)])
        if hook == "on_delivery_error":
            run.files.refuse = lambda payload: Refusal("no", retryable=False)
        await run.committed(20)
    assert len(run.letters.letters) == 20
    assert len([line for line in lines if "raised" in line["event"]]) == 1


# -- where an error came from -------------------------------------------------------------------------------------


def _take(message: SourceMessage) -> Any:
    raise KeyError("total")


class Arranging(Handler[Any, Any]):
    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [_take(each) for each in messages if each.offset == 1]


class Transforming(Handler[Any, Any]):
    async def transform(self, messages: Any) -> Any:
        return [_take(each) if each.offset == 1 else None for each in messages]


class Completing(Handler[Any, Any]):
    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return []

    async def on_message_complete(self, group: Any) -> Any:
        return _take(group.source_message) if group.source_message.offset == 1 else None


class Reading(Completing):
    def deserialize_message(self, message: SourceMessage) -> Any:
        return _take(message) if message.offset == 1 else None

    async def on_message_complete(self, group: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("handler", "kind"),
    [(Arranging, "arrange"), (Transforming, "transform"), (Completing, "hook"), (Reading, "parse")],
)
async def test_an_error_of_a_handler_is_told_with_its_line_and_logged_with_its_traceback(
    rig: Any, handler: type[Handler[Any, Any]], kind: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        run = rig(handler(), [message(offset) for offset in range(4)])
        await run.committed(4)
    (letter,) = run.letters.letters
    line = _take.__code__.co_firstlineno + 1
    assert letter.kind == kind
    assert letter.error.endswith(f"KeyError: 'total' (tests/pipeline/test_failures.py:{line} in _take)")
    logged = [entry["exc_info"] for entry in lines if "exc_info" in entry]
    assert [type(error) for error in logged] == ([] if kind == "parse" else [KeyError])
