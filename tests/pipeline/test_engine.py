"""The engine over scripted parts: commits, fan-out and fan-in, poison, retries, drain and revoke."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import pydantic
import pytest
from tests.pipeline.conftest import P0, P1, message

from tidemill.pipeline.handler import Handler
from tidemill.pipeline.models import (
    ErrorAction,
    ExecutorTask,
    PrecomputedResult,
)
from tidemill.runtime.progress import StopReason
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.sources.base import CommitStatus


def known(task_id: str, *offsets: int, **more: Any) -> ExecutorTask:
    return ExecutorTask(task_id, source_offsets=offsets, precomputed=PrecomputedResult("ok"), **more)


class Gated(Handler[Any, Any]):
    """One precomputed task per message; its hook waits until the test opens the message's gate."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.windows: list[list[int]] = []
        self.completed: list[int] = []

    async def arrange(self, messages, pending):
        self.windows.append([m.offset for m in messages])
        return [known(f"t{m.offset}", m.offset, metadata={"offset": m.offset}) for m in messages]

    async def on_task_complete(self, result):
        await self.gates[result.task.metadata["offset"]].wait()
        return CollectResult(files=[FilePayload(path="out", data={"offset": result.task.metadata["offset"]})])

    async def on_message_complete(self, group):
        self.completed.append(group.source_message.offset)

    def open(self, *offsets: int) -> None:
        for offset in offsets:
            self.gates[offset].set()


async def test_a_commit_never_passes_an_unfinished_message(rig):
    handler = Gated()
    run = rig(handler, [message(offset) for offset in (10, 11, 12, 13, 14)])
    await run.until(lambda: handler.windows)
    handler.open(10, 11, 12, 14)
    await run.committed(13)
    await run.settled()
    assert run.source.committed[P0] == 13
    handler.open(13)
    await run.committed(15)


async def test_racing_commits_never_move_the_offset_back(rig):
    handler = Gated()
    run = rig(handler, [message(offset) for offset in range(4)])
    run.source.hold_commits = True
    await run.until(lambda: handler.windows)
    handler.open(0)
    await run.until(lambda: run.source.commits == [{P0: 1}])
    handler.open(1, 2)
    await run.settled()
    assert run.source.commits == [{P0: 1}], "a second commit left while the first was in flight"
    run.source.answers.append(CommitStatus.AGAIN)
    run.source.answer()
    await run.until(lambda: len(run.source.commits) == 2)
    assert run.source.commits[1] == {P0: 3}
    run.source.hold_commits = False
    run.source.answer()
    handler.open(3)
    await run.committed(4)
    ends = [commit[P0] for commit in run.source.commits]
    assert ends == sorted(ends)


async def test_a_message_without_a_task_completes_and_commits(rig):
    class Nothing(Handler[Any, Any]):
        completed: list[int] = []

        async def arrange(self, messages, pending):
            return []

        async def on_message_complete(self, group):
            self.completed.append(group.total)

    run = rig(Nothing(), [message(offset) for offset in range(3)])
    await run.committed(3)
    assert Nothing.completed == [0, 0, 0]


async def test_fan_out_fires_the_message_hook_once_after_the_last_task(rig):
    class FanOut(Handler[Any, Any]):
        groups: list[Any] = []

        async def arrange(self, messages, pending):
            return [known(f"{m.offset}-{n}", m.offset) for m in messages for n in range(5)]

        async def on_message_complete(self, group):
            self.groups.append(group)

    run = rig(FanOut(), [message(7)])
    await run.committed(8)
    assert [(g.total, g.succeeded, g.all_succeeded) for g in FanOut.groups] == [(5, 5, True)]


async def test_fan_in_reports_one_task_to_each_of_its_messages(rig):
    class FanIn(Handler[Any, Any]):
        groups: list[Any] = []
        windows: list[Any] = []

        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_message_complete(self, group):
            self.groups.append(group)

        async def on_window_complete(self, results, messages):
            self.windows.append((len(results), len(messages)))

    run = rig(FanIn(), [message(offset) for offset in range(4)])
    await run.committed(4)
    assert [(g.source_message.offset, g.tasks[0].task_id) for g in FanIn.groups] == [(n, "all") for n in range(4)]
    await run.until(lambda: FanIn.windows)
    assert FanIn.windows == [(1, 4)]


class Failing(Handler[Any, Any]):
    """Each message runs `false`; what happens then is the test's to say."""

    answer: Any = ErrorAction.SKIP

    def __init__(self, answer: Any = ErrorAction.SKIP) -> None:
        self.answer = answer
        self.groups: list[Any] = []
        self.windows: list[Any] = []
        self.errors: list[Any] = []

    async def arrange(self, messages, pending):
        return [ExecutorTask(f"t{m.offset}", source_offsets=[m.offset], binary_path="false") for m in messages]

    async def on_error(self, task, error):
        self.errors.append(error)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(task) if callable(self.answer) else self.answer

    async def on_message_complete(self, group):
        self.groups.append(group)

    async def on_window_complete(self, results, messages):
        self.windows.append(results)


async def test_replacements_join_their_group_and_window(rig):
    handler = Failing(lambda task: [known(task.task_id + "b"), known(task.task_id + "c")])
    run = rig(handler, [message(0)])
    await run.committed(1)
    group = handler.groups[0]
    assert [task.task_id for task in group.tasks] == ["t0", "t0b", "t0c"]
    assert (group.succeeded, group.failed, group.replaced) == (2, 0, 1)
    assert group.tasks[1].parent_task_id == "t0"
    await run.until(lambda: handler.windows)
    assert len(handler.windows[0]) == 2


@pytest.mark.parametrize("answer", [ErrorAction.SKIP, lambda task: []])
async def test_skip_and_an_empty_list_complete_the_task(rig, answer):
    handler = Failing(answer)
    run = rig(handler, [message(0)])
    await run.committed(1)
    assert handler.groups[0].failed == 1
    assert run.letters.letters == []
    assert run.engine.progress().skipped == 1


@pytest.mark.parametrize("answer", [ErrorAction.DLQ, RuntimeError("the hook itself"), "nonsense"])
async def test_dlq_a_raising_on_error_and_nonsense_write_one_letter(rig, answer):
    handler = Failing(answer)
    run = rig(handler, [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.task_id, letter.exit_code, len(letter.sources)) == ("task", "t0", 1, 1)
    assert handler.groups[0].any_failed


async def test_retry_beyond_the_limit_is_a_letter(rig):
    handler = Failing(ErrorAction.RETRY)
    backoff = {"initial_seconds": 0.01, "max_seconds": 0.02}
    run = rig(handler, [message(0)], executor={"max_retries": 2, "retry_backoff": backoff})
    await run.committed(1)
    assert len(handler.errors) == 3
    (letter,) = run.letters.letters
    assert letter.attempt_count == 3


async def test_a_letter_holds_the_offset_until_it_is_confirmed(rig):
    run = rig(Failing(ErrorAction.DLQ), [message(0), message(1)])
    run.letters.hold = True
    await run.until(lambda: len(run.letters.letters) == 2)
    await run.settled()
    assert run.source.committed == {}
    assert "dead letters" in run.engine.progress().stalled
    run.letters.hold = False
    run.letters.confirm()
    await run.committed(2)


async def test_arrange_that_raises_for_one_of_a_hundred_dead_letters_that_one(rig):
    class Poisoned(Handler[Any, Any]):
        done: set[int] = set()

        async def arrange(self, messages, pending):
            if any(m.offset == 37 for m in messages):
                raise ValueError("cannot take 37")
            return [known(f"t{m.offset}", m.offset) for m in messages]

        async def on_message_complete(self, group):
            self.done.add(group.source_message.offset)

    run = rig(Poisoned(), [message(offset) for offset in range(100)])
    await run.committed(100)
    assert Poisoned.done == set(range(100)) - {37}
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset, letter.error) == (
        "arrange",
        37,
        "ValueError: cannot take 37",
    )


@pytest.mark.parametrize("returned", [None, ["task"], 7])
async def test_arrange_that_returns_nonsense_dead_letters_with_what_to_return(rig, returned):
    class Wrong(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return returned

    run = rig(Wrong(), [message(0)])
    await run.committed(1)
    assert "must return a list of ExecutorTask" in run.letters.letters[0].error


class Model(pydantic.BaseModel):
    n: int


class Parsing(Handler[Model, Any]):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def arrange(self, messages, pending):
        self.seen += messages
        return []


VALUES = [b'{"n": 1}', b"not json", b'{"n": 3}', None]


async def test_a_value_that_does_not_parse_is_dead_lettered_and_a_tombstone_on_request(rig):
    handler = Parsing()
    handler.accept_tombstones = False
    run = rig(handler, [message(offset, value) for offset, value in enumerate(VALUES)])
    await run.committed(4)
    assert [m.payload.n for m in handler.seen] == [1, 3]
    assert sorted((letter.kind, letter.sources[0].offset) for letter in run.letters.letters) == [
        ("parse", 1),
        ("tombstone", 3),
    ]


async def test_with_pass_a_value_that_does_not_parse_reaches_arrange(rig):
    handler = Parsing()
    run = rig(
        handler,
        [message(offset, value) for offset, value in enumerate(VALUES)],
        kafka={"on_parse_error": "pass"},
    )
    await run.committed(4)
    assert [m.payload is None for m in handler.seen] == [False, True, False, True]
    assert "json" in handler.seen[1].parse_error.lower()
    assert run.letters.letters == []


@pytest.mark.parametrize("hook", ["on_task_complete", "on_message_complete", "on_window_complete"])
async def test_a_raising_hook_writes_one_letter_and_stops_nothing(rig, hook):
    class Raising(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

    async def explode(*arguments: object) -> None:
        raise LookupError("broken hook")

    handler = Raising()
    setattr(handler, hook, explode)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await run.until(lambda: run.letters.letters)
    (letter,) = run.letters.letters
    assert letter.kind == "hook"
    assert "broken hook" in letter.error


@pytest.mark.parametrize(
    ("collect", "error"),
    [
        (
            CollectResult(files=[FilePayload(path="a", data=1)], kafka=[KafkaPayload("nowhere", data=1)]),
            "nowhere",
        ),
        ({"files": []}, "CollectResult"),
    ],
)
async def test_an_unknown_sink_or_a_wrong_type_delivers_nothing_of_that_result(rig, collect, error):
    class Misrouted(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_task_complete(self, result):
            return collect

    run = rig(Misrouted(), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.kind == "hook"
    assert error in letter.error
    assert run.files.payloads == []


async def test_a_slow_sink_holds_only_the_messages_that_wait_for_it(rig):
    class Half(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset, metadata={"n": m.offset}) for m in messages]

        async def on_task_complete(self, result):
            if result.task.metadata["n"] == 2:
                return CollectResult(files=[FilePayload(path="slow", data=2)])
            return CollectResult(kafka=[KafkaPayload(data=1)])

    run = rig(Half(), [message(offset) for offset in range(4)])
    run.files.open.clear()
    await run.committed(2)
    await run.settled()
    assert run.source.committed[P0] == 2
    run.files.open.set()
    await run.committed(4)


async def test_window_payloads_hold_the_offsets_only_when_asked_to(rig):
    class PerWindow(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return []

        async def on_window_complete(self, results, messages):
            return CollectResult(files=[FilePayload(path="w", data=len(messages))])

    held = rig(PerWindow(), [message(0)], executor={"commit": "window"})
    held.files.open.clear()
    free = rig(PerWindow(), [message(0)])
    free.files.open.clear()
    await free.committed(1)
    await held.settled()
    assert held.source.committed == {}
    held.files.open.set()
    free.files.open.set()
    await held.committed(1)
    await free.end()
    assert len(free.files.payloads) == 1, "a drain waits for window payloads"


async def test_a_repeated_task_id_and_foreign_offsets_are_warned_about_and_run(rig):
    class Careless(Handler[Any, Any]):
        results: list[str] = []

        async def arrange(self, messages, pending):
            return [known("same", messages[0].offset), known("same", messages[0].offset, 999)]

        async def on_task_complete(self, result):
            self.results.append(result.task.task_id)

    run = rig(Careless(), [message(0)])
    await run.committed(1)
    assert Careless.results == ["same", "same"]
    assert run.engine.progress().warnings == 2


async def test_pending_shows_tasks_that_back_off_and_windows_overlap(rig):
    class Asking(Handler[Any, Any]):
        seen: list[Any] = []

        async def arrange(self, messages, pending):
            self.seen.append(sorted(pending.pending_task_ids))
            return [ExecutorTask(f"t{m.offset}", source_offsets=[m.offset], binary_path="false") for m in messages]

    run = rig(Asking(), [message(0)], executor={"retry_backoff": {"initial_seconds": 5, "max_seconds": 5}})
    await run.until(lambda: run.engine.progress().tasks_retrying == 1)
    run.source.feed(message(1))
    await run.until(lambda: len(Asking.seen) == 2)
    assert Asking.seen == [[], ["t0"]]
    run.engine.settings.executor.drain_timeout_seconds = 0.0
    summary = await run.end()
    assert summary.reason is StopReason.DRAINED
    assert run.source.committed == {}
    assert run.letters.letters == [], "what backs off at the end is redelivered, never dead-lettered"


async def test_a_drain_finishes_what_is_in_hand_and_commits_the_prefix(rig):
    handler = Gated()
    run = rig(handler, [message(offset) for offset in range(6)], executor={"drain_timeout_seconds": 0.3})
    await run.until(lambda: handler.windows)
    handler.open(0, 1, 2, 4)
    await run.until(lambda: len(handler.completed) == 4)
    summary = await run.end()
    assert summary.reason is StopReason.DRAINED
    assert run.source.committed[P0] == 3
    assert run.source.left is True


async def test_a_revoke_waits_for_the_work_in_hand_and_late_results_change_nothing(rig):
    handler = Gated()
    run = rig(
        handler,
        [message(0), message(1), message(0, partition=1)],
        executor={"drain_timeout_seconds": 0.3},
    )
    await run.until(lambda: len(handler.windows) == 2)
    handler.open(0)
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    offsets = await revoked
    assert run.source.committed.get(P0) == 1
    assert offsets in ({}, {P0: 1})
    delivered = len(run.files.payloads)
    handler.open(1)
    await run.settled()
    assert [p.data["offset"] for p in run.files.payloads[delivered:]] == []
    assert P1 not in offsets


async def test_a_fenced_engine_stops_delivering_and_says_so(rig):
    handler = Gated()
    run = rig(handler, [message(0), message(1)])
    await run.until(lambda: handler.windows)
    run.source.fence()
    handler.open(0, 1)
    summary = await asyncio.wait_for(run._task, 10)
    assert summary.reason is StopReason.FENCED
    assert run.files.payloads == []
    assert run.source.left is False


async def test_a_linger_collects_messages_into_one_window(rig):
    handler = Gated()
    run = rig(handler, [message(0)], executor={"window_linger_ms": 150})
    await run.until(lambda: run.engine.progress().consumed == 1)
    run.source.feed(message(1))
    await run.until(lambda: handler.windows)
    assert handler.windows == [[0, 1]]


async def test_backpressure_bounds_what_is_in_hand_and_does_not_deadlock(rig):
    class Counting(Handler[Any, Any]):
        most = 0

        async def arrange(self, messages, pending):
            Counting.most = max(Counting.most, len(pending.pending_tasks) + len(messages))
            return [ExecutorTask(f"t{m.offset}", source_offsets=[m.offset], binary_path="true") for m in messages]

    executor = {
        "max_executors": 2,
        "window_size": 7,
        "backpressure_high_multiplier": 5,
        "backpressure_low_multiplier": 1,
    }
    run = rig(Counting(), [message(offset) for offset in range(200)], executor=executor)
    await run.committed(200)
    assert Counting.most <= 10 + 7


async def test_a_payload_that_cannot_be_encoded_is_that_payloads_failure(rig):
    class Unencodable(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="a", data=object()), FilePayload(path="b", data=1)])

    run = rig(Unencodable(), [message(0)])
    await run.committed(1)
    assert [p.path for p in run.files.payloads] == ["b"]
    assert run.letters.letters[0].kind == "delivery"


async def test_two_thousand_known_results_do_not_recurse(rig):
    class Many(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known(f"t{n}", messages[0].offset) for n in range(2000)]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="a", data=json.dumps(result.task.task_id))])

    run = rig(Many(), [message(0)])
    await run.committed(1)
    assert len(run.files.payloads) == 2000
