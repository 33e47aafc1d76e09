"""The engine over scripted parts: commits, fan-out and fan-in, poison, retries, drain and revoke."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pydantic
import pytest
import structlog
from tests.pipeline.conftest import P0, P1, message
from tests.until import slack

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import (
    ErrorAction,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    PrecomputedResult,
)
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import StopReason
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
    assert "dead letters" in run.engine.progress().waits
    run.letters.hold = False
    run.letters.confirm()
    await run.committed(2)


async def test_letters_that_were_dropped_are_in_the_progress_and_the_summary(rig):
    run = rig(Failing(ErrorAction.DLQ), [message(0)])
    await run.committed(1)
    run.letters.dropped = 1
    assert run.engine.progress().letters_dropped == 1
    assert (await run.end()).progress.letters_dropped == 1


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
    assert (letter.kind, letter.sources[0].offset) == ("arrange", 37)
    assert letter.error.startswith("ValueError: cannot take 37 (tests/pipeline/test_engine.py:")


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


UNREADABLE = "the name of a header is not UTF-8: b'caf\\xe9'"


@pytest.mark.parametrize("value", [b'{"n": 1}', b"not json", None])
async def test_a_message_whose_headers_cannot_be_read_is_dead_lettered_with_the_error(rig, value):
    handler = Parsing()
    bad = SourceMessage("t", 0, 1, value=value, headers_error=UNREADABLE)
    run = rig(handler, [message(0, b'{"n": 0}'), bad, message(2, b'{"n": 2}')])
    await run.committed(3)
    assert [m.offset for m in handler.seen] == [0, 2]
    (letter,) = run.letters.letters
    assert (letter.kind, letter.error) == ("parse", f"UnreadableHeadersError: {UNREADABLE}")
    assert letter.sources[0].headers_error == UNREADABLE


async def test_with_pass_a_message_whose_headers_cannot_be_read_reaches_arrange(rig):
    handler = Parsing()
    bad = SourceMessage("t", 0, 0, value=b'{"n": 1}', headers_error=UNREADABLE)
    run = rig(handler, [bad], kafka={"on_parse_error": "pass"})
    await run.committed(1)
    assert (handler.seen[0].payload, handler.seen[0].headers_error) == (None, UNREADABLE)
    assert handler.seen[0].parse_error == f"UnreadableHeadersError: {UNREADABLE}"


async def test_the_brake_counts_and_holds_messages_whose_headers_cannot_be_read(rig):
    bad = [SourceMessage("t", 0, n, value=b"{}", headers_error=UNREADABLE) for n in range(100)]
    run = rig(Parsing(), bad, executor={"max_failure_ratio": 0.5})
    await run.until(lambda: "brake of engine 0" in run.engine.progress().waits)
    assert "UnreadableHeadersError" in run.engine.progress().waits["brake of engine 0"]


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


class WaitsForFiles(Handler[Any, Any]):
    """A task per message that ends when its file is there; its hook delivers something."""

    def __init__(self, folder: Path, exit_code: int = 0) -> None:
        self.folder, self.exit_code = folder, exit_code

    async def arrange(self, messages, pending):
        script = f"until [ -e {self.folder}/$0 ]; do sleep 0.01; done; exit {self.exit_code}"
        return [
            ExecutorTask(f"t{m.offset}", ("-c", script, str(m.offset)), source_offsets=(m.offset,)) for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out", data="done")])

    async def on_error(self, task, error):
        return ErrorAction.SKIP


class DeliversNothing(WaitsForFiles):
    async def on_task_complete(self, result):
        return None


class DeliversPerMessage(DeliversNothing):
    async def on_message_complete(self, group):
        return CollectResult(files=[FilePayload(path="out", data="done")])


class HasPairs(WaitsForFiles):
    async def arrange(self, messages, pending):
        first, _, last = await super().arrange(messages, pending)
        return [ExecutorTask("pair", first.args, source_offsets=(0, 1)), last]


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(WaitsForFiles, id="delivered"),
        pytest.param(DeliversNothing, id="nothing to deliver"),
        pytest.param(DeliversPerMessage, id="delivered for the message"),
        pytest.param(HasPairs, id="of two messages"),
        pytest.param(functools.partial(WaitsForFiles, exit_code=3), id="failed"),
    ],
)
async def test_what_a_task_wrote_is_not_kept_until_the_slowest_of_its_window_has_ended(rig, tmp_path, handler):
    it = rig(handler(tmp_path), [message(0), message(1), message(2)], executor={"binary_path": "/bin/sh"})
    for offset in (0, 1):
        (tmp_path / str(offset)).touch()
    await it.until(lambda: it.engine.counters.messages_done == 2)
    await it.settled()
    (partition,) = it.engine.intake.partitions.values()
    assert len(partition.pending) == 1
    ended = [each for each in gc.get_objects() if isinstance(each, ExecutorResult | ExecutorError)]
    assert not [each for each in ended if str(tmp_path) in str(each.task.args)]
    (tmp_path / "2").touch()
    await it.committed(3)


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


async def test_a_drain_finishes_what_is_in_flight_and_commits_the_prefix(rig):
    handler = Gated()
    run = rig(handler, [message(offset) for offset in range(6)], executor={"drain_timeout_seconds": 0.3})
    await run.until(lambda: handler.windows)
    handler.open(0, 1, 2, 4)
    await run.until(lambda: len(handler.completed) == 4)
    summary = await run.end()
    assert summary.reason is StopReason.DRAINED
    assert run.source.committed[P0] == 3
    assert run.source.left is True


async def test_a_revoke_waits_for_the_work_in_flight_and_late_results_change_nothing(rig):
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


class Paced(Handler[Any, Any]):
    """One process per message: it runs until its file is there, or fails at once where the message says so."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.done: list[int] = []

    def open(self, offset: int) -> None:
        (self.folder / str(offset)).touch()

    async def arrange(self, messages, pending):
        script = "while [ ! -e $0 ]; do sleep 0.01; done; exit $1"
        return [
            ExecutorTask(
                f"t{m.offset}",
                source_offsets=[m.offset],
                binary_path="sh",
                args=["-c", script, str(self.folder / str(m.offset)), "1" if m.value == b"fails" else "0"],
                metadata={"offset": m.offset},
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        self.done.append(result.task.metadata["offset"])


async def test_a_revoke_waits_for_running_tasks_only_and_leaves_the_queue_to_the_next_owner(rig, tmp_path):
    handler = Paced(tmp_path)
    run = rig(handler, [message(offset) for offset in range(6)], executor={"max_executors": 2})
    await run.until(lambda: run.engine.progress().tasks_running == 2)
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await run.until(lambda: run.engine.progress().tasks_queued == 0)
    handler.open(0)
    await run.committed(1)
    assert not revoked.done(), "the second task runs"
    for offset in range(1, 6):
        handler.open(offset)
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 2
    assert handler.done == [0, 1], "what had not started ran nevertheless"


async def test_a_revoke_does_not_wait_for_a_task_that_would_have_to_run_again(rig, tmp_path):
    handler = Paced(tmp_path)
    messages = [message(0), message(1, b"fails"), message(2)]
    run = rig(handler, messages, executor={"max_executors": 3})
    await run.until(lambda: run.engine.progress().tasks_running == 3)
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await asyncio.sleep(0)
    handler.open(1)
    handler.open(0)
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 1, "behind a message that runs again nothing can be committed"
    assert run.engine.progress().tasks_retrying == 0
    await run.until(lambda: run.engine.progress().tasks_running == 0)
    assert run.letters.letters == []


async def test_a_revoke_starts_no_window_that_is_still_being_arranged(rig):
    class Slow(Gated):
        entered = asyncio.Event()
        go = asyncio.Event()

        async def arrange(self, messages, pending):
            if messages[0].offset == 2:
                self.entered.set()
                await self.go.wait()
            return await super().arrange(messages, pending)

    handler = Slow()
    run = rig(handler, [message(0), message(1)])
    await run.until(lambda: handler.windows)
    run.source.feed(message(2), message(3))
    await handler.entered.wait()
    run.source.feed(message(4))
    await run.until(lambda: run.engine.progress().consumed == 5)
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await asyncio.sleep(0)
    handler.go.set()
    handler.open(*range(5))
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 2
    assert {payload.data["offset"] for payload in run.files.payloads} == {0, 1}


async def test_a_revoke_with_a_head_that_has_not_started_waits_for_nothing(rig, tmp_path):
    handler = Paced(tmp_path)
    backoff = {"initial_seconds": 50, "max_seconds": 50}
    run = rig(handler, [message(0, b"fails"), message(1)], executor={"retry_backoff": backoff})
    handler.open(0)
    await run.until(lambda: run.engine.progress().tasks_retrying == 1)
    await asyncio.wait_for(run.source.revoke(P0), 30)
    assert P0 not in run.source.committed
    await run.until(lambda: run.engine.progress().tasks_running == 0)


async def test_other_partitions_continue_and_commit_while_a_revoked_one_is_waited_for(rig, tmp_path):
    handler = Paced(tmp_path)
    later = [message(offset, partition=1) for offset in range(1, 40)]
    run = rig(handler, [message(0), message(1000)], executor={"max_executors": 4})
    await run.until(lambda: run.engine.progress().tasks_running == 2)
    run.source._buffers[P1] = type(run.source._buffers[P0])()
    run.source.events.on_assigned([P1])
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    for offset in range(1, 40):
        handler.open(offset)
    run.source.feed(*later)
    await run.committed(40, P1)
    assert not revoked.done()
    handler.open(0)
    handler.open(1000)
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 1001


async def test_the_revoke_timeout_may_be_shorter_than_the_drain_timeout(rig, tmp_path):
    run = rig(Paced(tmp_path), [message(0)], kafka={"revoke_timeout_seconds": 0.2})
    await run.until(lambda: run.engine.progress().tasks_running)
    await asyncio.wait_for(run.source.revoke(P0), 30)
    assert P0 not in run.source.committed
    await run.until(lambda: run.engine.progress().tasks_running == 0)


class Nothing(Handler[Any, Any]):
    async def arrange(self, messages, pending):
        return []


async def test_a_partition_without_news_is_not_visited(rig):
    run = rig(Nothing(), [message(0, partition=n) for n in range(100)])
    await run.until(lambda: len(run.source.committed) == 100)
    visited: list[Any] = []
    pull = run.source.pull
    run.source.pull = lambda partition, limit: visited.append(partition) or pull(partition, limit)
    run.source.feed(message(1, partition=7))
    await run.committed(2, ("t", 7))
    assert set(visited) == {("t", 7)}


async def test_a_partition_without_room_continues_when_others_leave_and_its_share_grows(rig, tmp_path):
    handler = Paced(tmp_path)
    run = rig(
        handler,
        [*(message(offset) for offset in range(40)), message(100, partition=1)],
        executor={
            "max_executors": 1,
            "window_size": 1,
            "backpressure_high_multiplier": 20,
            "backpressure_low_multiplier": 19,
        },
    )
    await run.until(lambda: run.engine.progress().paused == ["t/0"])
    held = run.engine.counters.consumed
    assert held == 11
    run.source.lose(P1)
    await run.until(lambda: run.engine.counters.consumed == held + 10)


async def test_a_snapshot_is_not_changed_by_what_happens_after_it(rig):
    run = rig(Nothing(), [message(0)])
    await run.committed(1)
    await run.until(lambda: run.engine.progress().committed == {"t/0": 1})
    before = run.engine.progress()
    run.source.feed(message(1))
    await run.until(lambda: run.engine.progress().committed == {"t/0": 2})
    assert before.committed == {"t/0": 1}


async def test_a_fenced_engine_stops_delivering_and_says_so(rig):
    handler = Gated()
    run = rig(handler, [message(0), message(1)])
    await run.until(lambda: handler.windows)
    run.source.fence()
    handler.open(0, 1)
    summary = await asyncio.wait_for(run._task, 30)
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


async def test_backpressure_bounds_what_is_in_flight_and_does_not_deadlock(rig):
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


# -- what a handler may do wrong -------------------------------------------------------------------------------


class Returns(Handler[Any, Any]):
    """One task per window: the given one for offset 0, a good one for the others."""

    def __init__(self, task: ExecutorTask) -> None:
        self.task = task

    async def arrange(self, messages, pending):
        return [self.task if messages[0].offset == 0 else ExecutorTask("good", binary_path="true")]


WRONG: dict[str, Any] = {
    "source_offsets": 5,
    "labels": None,
    "args": "one text",
    "precomputed": "text",
    "task_id": ["t"],
    "stdin": "\ud800",
    "env": 7,
    "binary_path": 7,
    "timeout_seconds": "soon",
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_task_with_a_wrong_field_is_a_letter_and_costs_no_slot(rig, field):
    class Wrong(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            wrong = {field: WRONG[field]} if messages[0].offset == 0 else {}
            return [ExecutorTask(**{"task_id": "t", "binary_path": "true", **wrong})]

    run = rig(Wrong(), [message(0)], executor={"max_executors": 1, "max_retries": 0})
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.kind in ("arrange", "task")
    run.source.feed(message(1))
    await run.committed(2)


async def test_known_output_with_lone_surrogates_is_a_result(rig):
    run = rig(Returns(ExecutorTask("t", precomputed=PrecomputedResult("\ud800"))), [message(0)])
    await run.committed(1)
    assert run.letters.letters == []


class Mute(Exception):
    """Its text cannot be read, and neither can it be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Exploding(Handler[Any, Any]):
    """One message; the named hook raises what it is given."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.hook = hook
        setattr(self, hook, self.explode_at_once if hook == "deserialize_message" else self.explode)
        self.error = error

    def explode_at_once(self, *arguments: object) -> None:
        raise self.error

    async def explode(self, *arguments: object) -> None:
        raise self.error

    async def arrange(self, messages, pending):
        return [ExecutorTask("fails", binary_path="false") if self.hook == "on_error" else known("well")]

    async def on_task_complete(self, result):
        data = object() if self.hook == "on_delivery_error" else 1
        return CollectResult(files=[FilePayload(path="out", data=data)])


HOOKS = ["arrange", "on_task_complete", "on_message_complete", "on_window_complete", "on_error", "on_delivery_error"]


@pytest.mark.parametrize("hook", [*HOOKS, "deserialize_message"])
async def test_an_error_whose_text_cannot_be_read_is_one_letter_like_any_other(rig, hook):
    run = rig(Exploding(hook, Mute()), [message(0)], executor={"commit": "window"})
    await run.committed(1)
    assert len(run.letters.letters) == 1


@pytest.mark.parametrize("hook", HOOKS)
async def test_a_hook_that_cancels_itself_is_one_letter_like_any_other(rig, hook):
    run = rig(Exploding(hook, asyncio.CancelledError()), [message(0)], executor={"commit": "window"})
    await run.committed(1)
    assert len(run.letters.letters) == 1


async def test_an_on_ready_that_cancels_itself_is_a_failed_start(rig):
    summary = await asyncio.wait_for(rig(Exploding("on_ready", asyncio.CancelledError()), [])._task, 30)
    assert summary.reason is StopReason.FAILED
    assert "on_ready" in summary.error


async def test_a_raising_label_keeps_no_message(rig):
    class Unnamed(Handler[Any, Any]):
        def message_label(self, message):
            raise ValueError("no label")

        async def arrange(self, messages, pending):
            raise RuntimeError("poison")

    run = rig(Unnamed(), [message(0), message(1)])
    await run.committed(2)
    assert [letter.kind for letter in run.letters.letters] == ["arrange", "arrange"]


async def test_what_is_logged_of_a_window_names_its_partition_as_one_text(rig):
    with structlog.testing.capture_logs() as lines:
        await rig(Exploding("on_message_complete", ValueError("no")), [message(0)]).committed(1)
    assert [line["partition"] for line in lines if line["event"] == "a hook raised"] == ["t/0"]


async def test_a_decision_that_cannot_be_shown_dead_letters_the_task(rig):
    run = rig(Failing(Mute()), [message(0)])
    run.engine.context.handler.answer = lambda task: Mute()
    await run.committed(1)
    assert run.letters.letters[0].kind == "task"


async def test_a_payload_that_cannot_be_shown_is_still_dead_lettered(rig):
    class Unshowable(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="a", data=Mute())])

    run = rig(Unshowable(), [message(0)])
    await run.committed(1)
    assert "cannot be shown" in run.letters.letters[0].original_payloads[0]


@pytest.mark.parametrize("commit", ["message", "window"])
async def test_a_handler_that_empties_its_lists_empties_only_its_own(rig, commit):
    class Emptying(Handler[Any, Any]):
        def __init__(self) -> None:
            self.completed: list[int] = []

        async def arrange(self, messages, pending):
            tasks = [known(f"t{m.offset}", m.offset) for m in messages]
            messages.clear()
            return tasks

        async def on_message_complete(self, group):
            self.completed.append(group.source_message.offset)

        async def on_window_complete(self, results, messages):
            results.clear()
            messages.clear()

    handler = Emptying()
    run = rig(handler, [message(0), message(1)], executor={"commit": commit})
    await run.committed(2)
    assert sorted(handler.completed) == [0, 1]


async def test_the_letter_of_a_misrouted_result_has_its_payloads(rig):
    class Misrouted(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(sink="nowhere", path="a", data="precious")])

    run = rig(Misrouted(), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert "precious" in "".join(letter.original_payloads)


async def test_a_sink_that_cancels_its_own_call_is_retried(rig):
    class Once(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("all")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="a", data=1)])

    tries: list[object] = []

    def refuse(payload: object) -> None:
        tries.append(payload)
        if len(tries) == 1:
            raise asyncio.CancelledError

    run = rig(Once(), [message(0)])
    run.files.refuse = refuse
    await run.committed(1)
    assert len(tries) == 2


# -- windows' own work, drains and partitions that go ----------------------------------------------------------


class GatedWindow(Handler[Any, Any]):
    """No tasks; the window's hook waits for its gate, then returns or raises what it is given."""

    def __init__(self, outcome: Any) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.outcome = outcome

    async def arrange(self, messages, pending):
        return []

    async def on_window_complete(self, results, messages):
        self.entered.set()
        await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


PAYLOAD = CollectResult(files=[FilePayload(path="w", data=1)])


async def test_a_drain_ends_as_soon_as_the_last_window_hook_has(rig):
    handler = GatedWindow(PAYLOAD)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    asyncio.get_running_loop().call_later(0.1, handler.gate.set)
    await asyncio.wait_for(run.end(), 30)
    assert len(run.files.payloads) == 1


async def test_a_drain_waits_for_the_letter_of_a_window_hook(rig):
    handler = GatedWindow(RuntimeError("broken hook"))
    handler.gate.set()
    run = rig(handler, [message(0)])
    run.letters.hold = True
    await run.until(lambda: run.letters.letters)
    ended = asyncio.ensure_future(run.end())
    await run.settled()
    assert not ended.done()
    run.letters.confirm()
    await ended
    assert run.letters.written == 1


async def test_a_revoke_waits_for_what_a_window_delivers(rig):
    handler = GatedWindow(PAYLOAD)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await run.settled()
    assert not revoked.done()
    handler.gate.set()
    await revoked
    assert len(run.files.payloads) == 1


async def test_a_window_hook_that_raises_after_its_partition_was_lost_writes_nothing(rig):
    handler = GatedWindow(RuntimeError("broken hook"))
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    run.source.lose(P0)
    handler.gate.set()
    await run.settled()
    assert run.letters.letters == []


async def test_no_hook_is_called_for_a_partition_that_is_lost(rig):
    class Losing(Handler[Any, Any]):
        def __init__(self) -> None:
            self.calls = 0
            self.lose = lambda: None

        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset) for m in messages]

        async def on_task_complete(self, result):
            self.calls += 1
            self.lose()

        async def on_message_complete(self, group):
            self.calls += 1

    handler = Losing()
    run = rig(handler, [message(0), message(1), message(2)])
    handler.lose = lambda: run.source.lose(P0)
    await run.until(lambda: handler.calls)
    await run.settled()
    assert handler.calls == 1


class Stubborn(Handler[Any, Any]):
    """Its only task ignores SIGTERM; every other message is a known result."""

    async def arrange(self, messages, pending):
        script = "trap '' TERM; exec sleep 60"
        return [
            ExecutorTask("stubborn", source_offsets=[0], binary_path="sh", args=["-c", script])
            if m.offset == 0
            else known(f"t{m.offset}", m.offset)
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="w", data=result.task.task_id)])


async def test_a_fenced_engine_delivers_nothing_of_what_waits_for_a_sink(rig):
    run = rig(Stubborn(), [message(0), message(1)], executor={"term_grace_seconds": 0.5})
    run.files.open.clear()
    await run.until(lambda: run.engine.outbox.statistics().sinks and run.engine.counters.tasks_done == 1)
    run.source.feed(message(2))
    await run.until(lambda: run.engine.counters.tasks_done == 2)
    await run.settled()
    run.source.fence()
    run.files.open.set()
    summary = await asyncio.wait_for(run._task, 30)
    assert summary.reason is StopReason.FENCED
    assert [payload.data for payload in run.files.payloads] == ["t1"], "only what was with the sink already"


async def test_an_engine_fenced_while_it_drains_ends_at_once_and_keeps_its_place(rig):
    run = rig(Stubborn(), [message(0)], executor={"drain_timeout_seconds": 15, "term_grace_seconds": 0.1})
    await run.until(lambda: run.engine.progress().tasks_running)
    run.engine.drain()
    await run.settled()
    run.source.fence()
    summary = await asyncio.wait_for(run._task, 5)
    assert summary.reason is StopReason.FENCED
    assert run.source.left is False


async def test_a_revoke_of_what_a_stop_gave_up_does_not_wait(rig):
    run = rig(Stubborn(), [message(0)], executor={"drain_timeout_seconds": 0.1, "term_grace_seconds": 2.0})
    await run.until(lambda: run.engine.progress().tasks_running)
    run.engine.drain()
    await run.until(lambda: all(lane.closed for lane in run.engine.intake.partitions.values()))
    run.engine.settings.executor.drain_timeout_seconds = 15
    await asyncio.wait_for(run.source.revoke(P0), 1)


async def test_a_stop_without_time_for_the_grace_still_kills_tasks(rig, monkeypatch):
    run = rig(Stubborn(), [message(0)], executor={"drain_timeout_seconds": 0.1, "term_grace_seconds": 2.0})
    await run.until(lambda: run.engine.progress().tasks_running)
    kill_all = run.engine.executor.kill_all
    # As on a machine that is so busy that the deadline of the stop passes first.
    monkeypatch.setattr(run.engine.executor, "kill_all", lambda grace_seconds: kill_all(grace_seconds + 10))
    (pid,) = (each.pid for each in run.engine.executor._processes)
    await run.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_last_commit_does_not_wait_for_a_partition_that_is_lost(rig):
    run = rig(Stubborn(), [message(1)])
    run.source.hold_commits = True
    await run.until(lambda: run.source.commits)
    run.engine.drain()
    await run.settled()
    run.source.lose(P0)
    await asyncio.wait_for(run._task, 30)


async def test_a_drain_whose_commits_fail_ends_by_its_deadline_and_counts_what_is_reprocessed(rig):
    handler = Gated()
    run = rig(handler, [message(offset) for offset in range(6)], executor={"drain_timeout_seconds": 0.1})
    run.source.hold_commits = True
    await run.until(lambda: handler.windows)
    handler.open(0, 1, 2, 4)
    await run.until(lambda: len(handler.completed) == 4)
    started = asyncio.get_running_loop().time()
    summary = await run.end()
    assert asyncio.get_running_loop().time() - started < 0.1 + 3.0 + 1.0
    assert summary.reason is StopReason.DRAINED
    assert summary.progress.uncommitted == 4


async def test_an_engine_that_another_one_succeeds_drains_and_commits_but_keeps_its_place_in_the_group(rig):
    run = rig(Nothing(), [message(0), message(1)])
    await run.committed(2)
    run.engine.drain(keep_membership=True)
    assert (await run.end()).reason is StopReason.DRAINED
    assert run.source.left is False


async def test_a_drain_that_leaves_unfinished_work_only_has_nothing_uncommitted(rig):
    handler = Gated()
    run = rig(handler, [message(0), message(1)], executor={"drain_timeout_seconds": 0.1})
    await run.until(lambda: handler.windows)
    handler.open(0)
    await run.committed(1)
    assert (await run.end()).progress.uncommitted == 0


async def test_a_stop_does_not_wait_for_what_ignores_its_end(rig):
    run = rig(Stubborn(), [message(0)], executor={"drain_timeout_seconds": 0.1, "term_grace_seconds": 60})
    await run.until(lambda: run.engine.progress().tasks_running)
    started = asyncio.get_running_loop().time()
    await run.end()
    assert asyncio.get_running_loop().time() - started < 0.1 + 3.0 + 1.0


async def test_bytes_freed_by_a_delivery_make_room_behind_a_slow_message(rig):
    run = rig(
        Stubborn(),
        [message(offset, b"x" * 100_000) for offset in range(100)],
        executor={
            "window_size": 5,
            "max_queued_bytes": 1 << 20,
            "window_max_bytes": 1 << 20,
            "drain_timeout_seconds": 0.1,
            "term_grace_seconds": 0.1,
        },
    )
    run.files.open.clear()
    await run.settled()
    held = run.engine.counters.consumed
    assert held < 100
    run.files.open.set()
    await run.until(lambda: run.engine.counters.consumed > held)
    assert run.source.committed == {}


async def test_on_assign_and_on_revoke_report_every_partition_that_comes_and_goes(rig):
    class Telling(Handler[Any, Any]):
        def __init__(self) -> None:
            self.told: list[tuple[str, list[Any]]] = []

        async def arrange(self, messages, pending):
            return []

        async def on_assign(self, partitions):
            self.told.append(("assign", sorted(partitions)))

        async def on_revoke(self, partitions):
            self.told.append(("revoke", sorted(partitions)))

    handler = Telling()
    run = rig(handler, [message(0), message(0, partition=1)])
    await run.committed(1)
    await run.source.revoke(P1)
    await run.until(lambda: len(handler.told) == 2)
    await run.end()
    assert handler.told == [("assign", [P0, P1]), ("revoke", [P1]), ("revoke", [P0])]


@pytest.mark.parametrize("where", ["deserialize_message", "arrange", "on_task_complete"])
async def test_sys_exit_in_a_hook_costs_its_message_and_not_the_engine(rig, where):
    class Leaving(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset) for m in messages]

    def leave(*arguments: object) -> None:
        raise SystemExit(3)

    async def leave_later(*arguments: object) -> None:
        raise SystemExit(3)

    handler = Leaving()
    setattr(handler, where, leave if where == "deserialize_message" else leave_later)
    run = rig(handler, [message(0)])
    await run.committed(1)
    assert len(run.letters.letters) == 1
    assert "3" in run.letters.letters[0].error


async def test_an_on_revoke_that_never_returns_leaves_the_stop_its_deadline(rig):
    class Keeping(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset) for m in messages]

        async def on_revoke(self, partitions):
            await asyncio.Event().wait()

    run = rig(Keeping(), [message(0)], executor={"drain_timeout_seconds": 1})
    await run.committed(1)
    started = time.monotonic()
    assert (await run.end()).reason == "drained"
    # The driver kills an engine 3 s after its drain timeout.
    assert time.monotonic() - started < slack(1 + 3)


async def test_a_hook_that_has_not_returned_is_named_when_the_drain_timeout_is_over(rig):
    class Keeping(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            await asyncio.Event().wait()

    run = rig(Keeping(), [message(0)], executor={"drain_timeout_seconds": 1.5})
    await run.until(lambda: run.engine.context.hooks.running)
    with structlog.testing.capture_logs() as logs:
        await run.end()
    (line,) = [line for line in logs if line["event"].startswith("the drain timeout has expired")]
    assert "has not returned" in line["hooks"]["arrange of t/0"]


class Panic(BaseException):
    """What pyo3 makes of a panic in a Rust extension."""


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt("mine"),
        GeneratorExit("mine"),
        asyncio.CancelledError("mine"),
        Panic("mine"),
        BaseExceptionGroup("mine", [SystemExit(3)]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "where",
    [
        "deserialize_message",
        "arrange",
        "on_task_complete",
        "on_message_complete",
        "on_window_complete",
        "message_label",
    ],
)
async def test_whatever_a_hook_raises_costs_its_message_and_not_the_engine(rig, where, error):
    class Raising(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            if where == "message_label" and messages[0].offset == 1:
                raise ValueError("it is labelled for the log")
            return [known(f"t{m.offset}", m.offset) for m in messages]

    handler = Raising()
    whole = getattr(handler, where)

    def concerns(subject: Any) -> bool:
        if where == "on_task_complete":
            return subject.task.task_id == "t1"
        if where == "on_message_complete":
            return subject.source_message.offset == 1
        if where == "on_window_complete":
            return True
        return (subject[0] if where == "arrange" else subject).offset == 1

    def raise_it(*arguments: Any) -> Any:
        if concerns(arguments[-1 if where == "on_window_complete" else 0]):
            raise error
        return whole(*arguments)

    async def raise_later(*arguments: Any) -> Any:
        returned = raise_it(*arguments)
        return await returned

    setattr(handler, where, raise_it if where in ("deserialize_message", "message_label") else raise_later)
    run = rig(handler, [message(0), message(1), message(2)], executor={"window_size": 1})
    await run.committed(3)
    assert len(run.letters.letters) == (3 if where == "on_window_complete" else 1)
    assert (await run.end()).reason == "drained"


async def test_a_letter_masks_what_a_program_said_of_secrets_and_keeps_its_message(rig):
    class Leaking(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            script = "echo no login at postgres://app:hunter2@db/x >&2; exit 1"
            return [ExecutorTask("t", ["-c", script, "password=hunter2"], binary_path="sh")]

        async def on_error(self, task, error):
            return ErrorAction.DLQ

    run = rig(Leaking(), [message(0, b"password=hunter2")])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert "hunter2" not in letter.stderr + letter.error + " ".join(letter.args)
    assert "db/x" in letter.stderr
    assert letter.sources[0].value == "password=hunter2"
