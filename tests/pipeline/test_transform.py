"""`transform`: windows without tasks, with everything that windows with tasks have."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.pipeline.conftest import P0, message
from tests.pipeline.recording.test_recorder import Recorded

from tidemill import periodic
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, SkipMessage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.probe_report import ProbeStatus
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.spark.preflight import make_handler
from tidemill.testing import run_handler

HUNDRED = range(100)


def line(offset: int) -> FilePayload:
    return FilePayload(path="out", data=offset)


def delivered(run: Any) -> list[Any]:
    return [payload.data for payload in run.files.payloads]


class Lines(Handler[Any, Any]):
    """A line for each message; what a test wants to know of the calls."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []

    async def transform(self, messages):
        self.windows.append([m.offset for m in messages])
        return [line(m.offset) for m in messages]


# -- what it returns ----------------------------------------------------------------------------------------------


async def test_each_message_has_its_place(rig):
    class Places(Handler[Any, Any]):
        async def transform(self, messages):
            places = [None, [], line(2), [line(3), KafkaPayload(data=3), line(33)]]
            messages.clear()  # its list is its own
            return places

    run = rig(Places(), [message(offset) for offset in range(4)])
    await run.committed(4)
    assert delivered(run) == [2, 3, 33]
    assert [payload.data for payload in run.sinks["kafka"]["kafka"].payloads] == [3]
    assert run.letters.letters == []
    assert run.engine.progress().messages_done == 4


async def test_a_collect_result_concerns_the_whole_window(rig):
    class Whole(Handler[Any, Any]):
        async def transform(self, messages):
            return CollectResult(files=[line(sum(m.offset for m in messages))])

    run = rig(Whole(), [message(offset) for offset in HUNDRED])
    run.files.open.clear()
    await run.until(lambda: run.engine.progress().consumed == 100)
    await run.settled()
    assert run.source.committed.get(P0) is None, "no message may be committed before what was made of all of them"
    run.files.open.set()
    await run.committed(100)
    assert delivered(run) == [4950]


async def test_nothing_to_deliver_is_done(rig):
    class Nothing(Handler[Any, Any]):
        async def transform(self, messages):
            return CollectResult()

    run = rig(Nothing(), [message(offset) for offset in HUNDRED])
    await run.committed(100)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, "transform must return a list with one item per message, or a CollectResult, not NoneType"),
        ("text", "not str"),
        ([], "it got 1 message and returned 0 items"),
        ([line(0), line(1)], "it got 1 message and returned 2 items"),
        (["text"], "item 0 must be a payload, a list of payloads, or None, not str"),
        ([CollectResult()], "item 0 must be a payload, a list of payloads, or None, not CollectResult"),
        ([[7]], "a payload must be one of .*FilePayload.*, not int"),
        ([SourceMessage("t", 0, 0)], "a payload must be one of .*, not SourceMessage"),
        ([FilePayload(path="out", data=1, sink="nowhere")], "sinks.filesystem.nowhere is not configured"),
        ([FilePayload(path=7)], "FilePayload.path must be a string, not int"),
        (CollectResult(kafka=[KafkaPayload("nowhere", data=1)]), "nowhere"),
    ],
)
async def test_what_cannot_be_delivered_is_a_letter_that_says_what_to_return(rig, returned, error):
    class Wrong(Handler[Any, Any]):
        async def transform(self, messages):
            return returned

    run = rig(Wrong(), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.kind == "transform"
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(letter.error)
    assert delivered(run) == []


async def test_the_letter_of_a_misrouted_result_has_its_payloads_and_no_other_message_suffers(rig):
    class Misrouted(Handler[Any, Any]):
        async def transform(self, messages):
            return [FilePayload(path="out", data=m.offset, sink="no" if m.offset == 37 else "") for m in messages]

    run = rig(Misrouted(), [message(offset) for offset in HUNDRED])
    await run.committed(100)
    (letter,) = run.letters.letters
    assert letter.sources[0].offset == 37
    assert '"data":37' in letter.original_payloads[0].replace(" ", "")
    assert delivered(run) == [offset for offset in HUNDRED if offset != 37]


# -- what it raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("cannot take 37"), SystemExit(3), asyncio.CancelledError()])
async def test_one_of_a_hundred_that_it_cannot_take_is_found_and_the_others_are_delivered_once_and_in_order(rig, error):
    class Poisoned(Lines):
        async def transform(self, messages):
            if any(m.offset == 37 for m in messages):
                raise error
            return await super().transform(messages)

    run = rig(Poisoned(), [message(offset) for offset in HUNDRED])
    await run.committed(100)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == ("transform", 37)
    assert delivered(run) == [offset for offset in HUNDRED if offset != 37]


async def test_skip_message_skips_a_single_one_and_counts_it(rig):
    class Skipping(Lines):
        async def transform(self, messages):
            if any(m.offset % 40 == 0 for m in messages):
                raise SkipMessage("not ours")
            return await super().transform(messages)

    run = rig(Skipping(), [message(offset) for offset in HUNDRED])
    await run.committed(100)
    assert delivered(run) == [offset for offset in HUNDRED if offset % 40]
    assert run.engine.progress().skipped == 3
    assert run.letters.letters == []


async def test_what_a_sink_refuses_is_a_letter_of_its_message_alone(rig):
    run = rig(Lines(), [message(offset) for offset in HUNDRED])
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if payload.data == 37 else None
    await run.committed(100)
    (letter,) = run.letters.letters
    assert (letter.kind, [source.offset for source in letter.sources]) == ("delivery", [37])


async def test_on_delivery_error_decides(rig):
    class Deciding(Lines):
        async def on_delivery_error(self, error):
            return DeliveryAction.SKIP

    run = rig(Deciding(), [message(offset) for offset in HUNDRED])
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if payload.data == 37 else None
    await run.committed(100)
    assert run.letters.letters == []
    assert len(delivered(run)) == 99


class Apart(Handler[Any, Any]):
    """Every message into a file of its own, so that none waits for the retries of another."""

    async def transform(self, messages):
        return [FilePayload(path=str(m.offset), data=m.offset) for m in messages]


SOON: dict[str, Any] = {
    "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.02},
    "breaker": {"failures": 100_000, "open_seconds": 0.1},
}


async def test_what_is_retried_keeps_back_no_other_message_of_its_window(rig):
    run = rig(Apart(), [message(offset) for offset in HUNDRED], delivery=SOON)
    refused = [97]
    run.files.refuse = lambda payload: Refusal("busy", retryable=True) if payload.data in refused else None
    await run.until(lambda: run.engine.progress().messages_done == 99)
    await run.committed(97)
    refused.clear()
    await run.committed(100)
    assert run.letters.letters == []
    assert sorted(delivered(run)) == list(HUNDRED)


async def test_a_letter_that_is_confirmed_waits_for_no_other_message_of_its_window(rig):
    run = rig(Apart(), [message(offset) for offset in HUNDRED], delivery=SOON)
    refused = [1]

    def refuse(payload: Any) -> Refusal | None:
        return (
            Refusal("no", retryable=False)
            if payload.data == 0
            else Refusal("busy", retryable=True)
            if refused
            else None
        )

    run.files.refuse = refuse
    await run.committed(1)
    refused.clear()
    await run.committed(100)
    assert [source.offset for letter in run.letters.letters for source in letter.sources] == [0]


async def test_a_message_is_committed_when_its_payloads_at_all_sinks_are_confirmed(rig):
    class Both(Handler[Any, Any]):
        async def transform(self, messages):
            return [[line(m.offset), KafkaPayload(data=m.offset)] if m.offset % 2 else line(m.offset) for m in messages]

    run = rig(Both(), [message(offset) for offset in HUNDRED])
    run.sinks["kafka"]["kafka"].open.clear()
    await run.committed(1)
    await run.until(lambda: run.engine.progress().messages_done == 50)
    await run.settled()
    assert run.source.committed[P0] == 1
    run.sinks["kafka"]["kafka"].open.set()
    await run.committed(100)


async def test_a_payload_that_cannot_be_encoded_is_its_messages_letter_alone(rig):
    class Unencodable(Handler[Any, Any]):
        async def transform(self, messages):
            return [FilePayload(path="out", data=object() if m.offset == 37 else m.offset) for m in messages]

    run = rig(Unencodable(), [message(offset) for offset in HUNDRED])
    await run.committed(100)
    assert [source.offset for letter in run.letters.letters for source in letter.sources] == [37]
    assert delivered(run) == [offset for offset in HUNDRED if offset != 37]


async def test_what_waits_for_a_sink_counts_by_message_and_is_forgotten_with_its_partition(rig):
    run = rig(Lines(), [message(offset) for offset in HUNDRED])
    run.files.open.clear()
    await run.until(lambda: run.engine.progress().consumed == 100)
    await run.until(lambda: run.engine.intake.partitions[P0].undelivered == 100)
    owned = run.engine.intake.partitions[P0]
    assert owned.undelivered_bytes == sum(len(b"%d\n" % offset) for offset in HUNDRED)
    assert run.engine.find_message("t", 0, 50).describe() == "its results wait for sinks.filesystem.files"
    run.source.lose(P0)
    run.files.open.set()
    await run.settled()
    assert run.source.committed.get(P0) is None
    assert run.engine.progress().in_flight == 0


# -- hooks --------------------------------------------------------------------------------------------------------


class Hooked(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.completed: list[int] = []
        self.whole: list[tuple[int, int]] = []

    async def on_message_complete(self, group):
        assert (group.tasks, group.results, group.errors, group.all_succeeded) == ([], [], [], True)
        self.completed.append(group.source_message.offset)
        return CollectResult(files=[FilePayload(path="message", data=group.source_message.offset)])

    async def on_window_complete(self, results, messages):
        self.whole.append((len(results), len(messages)))
        return CollectResult(files=[FilePayload(path="window", data=len(messages))])


@pytest.mark.parametrize("commit", ["message", "window"])
async def test_message_and_window_hooks_run_and_deliver(rig, commit):
    handler = Hooked()
    run = rig(handler, [message(offset) for offset in HUNDRED], executor={"commit": commit})
    await run.committed(100)
    await run.until(lambda: sum(size for _, size in handler.whole) == 100)
    assert sorted(handler.completed) == list(HUNDRED)
    assert {results for results, _ in handler.whole} == {0}
    await run.until(lambda: len(run.files.payloads) == 200 + len(handler.whole))


async def test_with_commit_window_nothing_is_committed_before_what_the_window_delivers(rig):
    class Slow(Hooked):
        gate = asyncio.Event()

        async def on_window_complete(self, results, messages):
            returned = await super().on_window_complete(results, messages)
            await self.gate.wait()
            return returned

    handler = Slow()
    run = rig(handler, [message(offset) for offset in HUNDRED], executor={"commit": "window"})
    await run.until(lambda: handler.whole)
    await run.settled()
    assert run.source.committed.get(P0) is None
    run.files.open.clear()
    handler.gate.set()
    await run.settled()
    assert run.source.committed.get(P0) is None, "what the window delivers is not confirmed"
    run.files.open.set()
    await run.committed(100)


@pytest.mark.parametrize("hook", ["on_message_complete", "on_window_complete"])
async def test_a_raising_hook_writes_one_letter_and_stops_nothing(rig, hook):
    async def explode(*arguments: object) -> None:
        raise LookupError("broken hook")

    handler = Lines()
    setattr(handler, hook, explode)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await run.until(lambda: run.letters.letters)
    (letter,) = run.letters.letters
    assert letter.kind == "hook"
    assert "broken hook" in letter.error


# -- partitions, order, the brake -----------------------------------------------------------------------------------


async def test_a_revoke_gives_back_what_is_not_transformed_and_delivers_nothing_of_it(rig):
    class Slow(Lines):
        entered = asyncio.Event()
        go = asyncio.Event()

        async def transform(self, messages):
            if messages[0].offset == 2:
                self.entered.set()
                await self.go.wait()
            return await super().transform(messages)

    handler = Slow()
    run = rig(handler, [message(0), message(1)])
    await run.committed(2)
    run.source.feed(message(2), message(3))
    await handler.entered.wait()
    run.source.feed(message(4))
    await run.until(lambda: run.engine.progress().consumed == 5)
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await asyncio.sleep(0)
    handler.go.set()
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 2
    assert delivered(run) == [0, 1]


async def test_a_drain_delivers_what_was_taken(rig):
    run = rig(Lines(), [message(offset) for offset in HUNDRED])
    await run.until(lambda: run.engine.progress().consumed == 100)
    summary = await run.end()
    assert summary.progress.messages_done == 100
    assert run.source.committed[P0] == 100


class Ordered(Lines):
    """The hook of message 0 waits, or message 0 fails, until the test says otherwise."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.is_broken = is_broken
        self.done: list[int] = []

    async def transform(self, messages):
        if self.is_broken and messages[0].offset == 0:
            raise LookupError("no database")
        return await super().transform(messages)

    async def on_message_complete(self, group):
        if group.source_message.offset == 0:
            await self.gate.wait()
        self.done.append(group.source_message.offset)


def keyed(offset: int, key: bytes) -> SourceMessage:
    return SourceMessage("t", 0, offset, key, b"x")


BY_KEY: dict[str, Any] = {"order_by": "key", "window_size": 1}


async def test_a_message_waits_for_the_hook_of_an_earlier_one_with_its_key(rig):
    handler = Ordered()
    run = rig(handler, [keyed(0, b"a"), keyed(1, b"a"), keyed(2, b"b"), keyed(3, b"a")], executor=BY_KEY)
    await run.until(lambda: handler.done == [2])
    await run.settled()
    assert handler.windows == [[0], [2]]
    handler.gate.set()
    await run.committed(4)
    assert handler.done == [2, 0, 1, 3]
    assert [each for window in handler.windows for each in window] == [0, 2, 1, 3]


@pytest.mark.parametrize("commit", ["message", "window"])
async def test_the_hooks_of_a_key_are_called_one_after_another_within_a_window_too(rig, commit):
    handler = Ordered()
    messages = [keyed(0, b"a"), keyed(1, b"a"), keyed(2, b"b"), keyed(3, b"a"), SourceMessage("t", 0, 4)]
    run = rig(handler, messages, executor={"order_by": "key", "window_size": 5, "commit": commit})
    await run.until(lambda: handler.done == [2, 4])
    run.source.feed(keyed(5, b"a"), keyed(6, b"b"))
    await run.until(lambda: handler.done == [2, 4, 6])
    await run.settled()
    assert handler.windows == [[0, 1, 2, 3, 4], [6]]
    assert delivered(run) == [0, 1, 2, 3, 4, 6]
    handler.gate.set()
    await run.committed(7)
    assert handler.done == [2, 4, 6, 0, 1, 3, 5]
    load = run.engine.context.load._loads[P0]
    await run.until(lambda: load.uncommitted == 0)
    assert (load.count, load.size_bytes) == (0, 0)


@pytest.mark.parametrize("commit", ["message", "window"])
async def test_a_revoke_finishes_the_hooks_of_a_window_that_wait_for_each_other(rig, commit):
    handler = Ordered()
    executor = {"order_by": "key", "window_size": 3, "commit": commit}
    run = rig(handler, [keyed(0, b"a"), keyed(1, b"a"), keyed(2, b"a"), keyed(3, b"a")], executor=executor)
    await run.until(lambda: delivered(run) == [0, 1, 2])
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await run.settled()
    handler.gate.set()
    await asyncio.wait_for(revoked, 30)
    assert handler.done == [0, 1, 2]
    assert run.source.committed[P0] == 3


@pytest.mark.parametrize("is_revoke", [False, True])
async def test_a_hook_that_the_brake_holds_keeps_back_those_of_its_key_and_no_end(rig, is_revoke, monkeypatch):
    monkeypatch.setattr("tidemill.core.pipeline.brake.LEAST", 5)

    class Failing(Lines):
        async def on_message_complete(self, group):
            self.called.append(group.source_message.offset)
            if group.source_message.key == b"a":
                raise LookupError("no database")

    handler = Failing()
    handler.called = []
    messages = [keyed(offset, b"ab"[offset % 2 : offset % 2 + 1]) for offset in range(40)]
    executor = {"order_by": "key", "window_size": 40, "max_failure_ratio": 0.01, "drain_timeout_seconds": 60}
    with capture_logs():
        run = rig(handler, messages, executor=executor, kafka={"revoke_timeout_seconds": 60})
        await run.until(lambda: set(range(1, 40, 2)) <= set(handler.called))
        await run.until(lambda: run.engine.progress().held == 1)
        await run.settled()
        lost = [letter.sources[0].offset for letter in run.letters.letters]
        failed = [offset for offset in handler.called if offset % 2 == 0]
        assert failed == [*lost, len(lost) * 2], "one is held, and those behind it wait"
        await asyncio.wait_for(run.source.revoke(P0) if is_revoke else run.end(), 30)
    assert run.source.committed[P0] == failed[-1]


async def test_a_revoke_gives_back_what_waits_for_its_key(rig):
    handler = Ordered()
    run = rig(handler, [keyed(0, b"a"), keyed(1, b"a"), keyed(2, b"b")], executor=BY_KEY)
    await run.until(lambda: handler.done == [2])
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await run.settled()
    handler.gate.set()
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] == 1
    assert [each for window in handler.windows for each in window] == [0, 2]


async def test_keys_of_messages_without_hooks_never_wait(rig):
    run = rig(Lines(), [keyed(offset, b"a") for offset in HUNDRED], executor={"order_by": "key"})
    await run.committed(100)
    assert delivered(run) == list(HUNDRED)


async def test_a_failure_that_the_brake_holds_is_tried_again_in_its_turn(rig, monkeypatch):
    monkeypatch.setattr("tidemill.core.pipeline.brake.TRIAL_SECONDS", 0.3)

    class Broken(Lines):
        is_broken = True

        async def transform(self, messages):
            if self.is_broken:
                raise LookupError("no database")
            return await super().transform(messages)

    handler = Broken()
    executor = {"max_failure_ratio": 0.5, "order_by": "key", "window_size": 10}
    with capture_logs():
        run = rig(handler, [keyed(offset, b"%d" % (offset % 7)) for offset in range(200)], executor=executor)
        await run.until(lambda: run.engine.progress().waits.get("brake of engine 0"))
        assert "with transform: LookupError" in run.engine.progress().waits["brake of engine 0"]
        await run.settled()
        assert run.engine.progress().held
        handler.is_broken = False
        await run.committed(200, P0)
    of_key = defaultdict(list)
    for offset in delivered(run):
        of_key[offset % 7].append(offset)
    lost = {source.offset for letter in run.letters.letters for source in letter.sources}
    assert sorted([*lost, *delivered(run)]) == list(range(200))
    assert all(found == sorted(found) for found in of_key.values()), "results of a key came out of order"


# -- what is told of it -------------------------------------------------------------------------------------------


async def test_a_transform_that_never_returns_is_named(rig, monkeypatch):
    class Stuck(Handler[Any, Any]):
        async def transform(self, messages):
            await asyncio.Event().wait()

    monkeypatch.setattr("tidemill.pipeline.hooks.HOOK_SECONDS", 0.1)
    run = rig(Stuck(), [message(5), message(6)])
    await run.until(lambda: "transform of t/0" in run.engine.progress().waits)
    assert "(messages 5 to 6)" in run.engine.progress().waits["transform of t/0"]
    stage = run.engine.find_message("t", 0, 6)
    assert stage.describe().startswith("transform has not returned for")
    run.source.feed(message(7))
    await run.until(lambda: run.engine.progress().consumed == 3)
    assert run.engine.find_message("t", 0, 7).describe() == "it waits for transform (it is busy with earlier messages)"


async def test_messages_are_recorded_without_tasks(rig):
    class Some(Lines):
        async def transform(self, messages):
            if any(m.offset == 7 for m in messages):
                raise ValueError("seven")
            return await super().transform(messages)

    debug = {"enabled": True, "db_dir": ""}
    run = rig(Some(), [message(offset) for offset in range(20)], debug=debug)
    await run.committed(20)
    await run.end()
    rows = {row["offset"]: row for row in Recorded(run.recorder).rows["messages"]}
    assert set(rows) == set(range(20))
    assert (rows[3]["status"], rows[3]["tasks"], rows[3]["payloads"], rows[3]["error"]) == ("done", 0, 1, None)
    assert rows[3]["arranged_at"] is not None
    assert (rows[7]["status"], rows[7]["payloads"]) == ("rejected", 0)


@pytest.mark.parametrize(("offset", "status", "kinds"), [(7, ProbeStatus.DONE, []), (13, None, ["transform"])])
async def test_a_probe_goes_through_it(rig, offset, status, kinds):
    class Some(Lines):
        async def transform(self, messages):
            if messages[0].offset == 13:
                return [7]
            return await super().transform(messages)

    run = rig(Some(), [], debug={"enabled": True, "db_dir": ""})
    await run.until(lambda: run.engine._subscribed)
    found = await run.engine.prober.probe(message(offset, b"hello"), 20.0)
    assert [stage.hook for stage in found.stages] == ["deserialize_message", "transform"]
    assert [letter.kind for letter in found.letters] == kinds
    if status is not None:
        assert found.status is status
        assert [payload.hook for payload in found.payloads] == ["transform"]
    assert delivered(run) == []


def test_run_handler_runs_it():
    run = run_handler(Lines, [b"a", b"b", None])
    assert [payload.data for payload in run.payloads["filesystem.files"]] == [0, 1, 2]
    assert all(outcome.succeeded for outcome in run.outcomes)


def double(number: int) -> int:
    return 2 * number


class Served(Handler[dict[str, int], Any]):
    """Uses what engines offer to handlers: the cache, threads or processes of their own, and periodic work."""

    def __init__(self) -> None:
        self.refreshed = asyncio.Event()

    @periodic(0.01)
    async def refresh(self):
        self.refreshed.set()

    async def transform(self, messages):
        await self.refreshed.wait()
        places = []
        for m in messages:
            key = f"{m.payload['n']}"
            if (found := await self.cache.get(key)) is None:
                found = await self.offload(double, m.payload["n"])
                self.cache.set(key, found)
                places.append(line(found))
            else:
                places.append(None)
        return places


def test_the_cache_offload_and_periodic_work_are_there(tmp_path):
    config = {"cache": {"enabled": True, "path": str(tmp_path / "cache")}}
    first = run_handler(Served(), [{"n": 1}, {"n": 2}, {"n": 1}], config)
    assert [payload.data for payload in first.payloads["filesystem.files"]] == [2, 4]
    again = run_handler(Served(), [{"n": 2}, {"n": 3}], config)
    assert [payload.data for payload in again.payloads["filesystem.files"]] == [6]


async def test_a_transform_that_blocks_the_loop_is_named(rig):
    class Blocking(Lines):
        async def transform(self, messages):
            time.sleep(0.8)  # what is tested
            return await super().transform(messages)

    with capture_logs() as logs:
        run = rig(Blocking(), [message(offset) for offset in range(3)])
        await run.committed(3)
        await run.until(lambda: [entry for entry in logs if entry.get("hook") == "transform"])


def test_a_handler_has_one_of_both():
    class Both(Lines):
        async def arrange(self, messages, pending):
            return []

    class Neither(Handler[Any, Any]):
        async def transfrom(self, messages):
            return []

    class Unused(Lines):
        async def on_task_complete(self, result):
            return None

    with pytest.raises(HandlerError, match="Both defines both arrange and transform; keep"):
        make_handler(Both)
    with pytest.raises(HandlerError, match=r"does not define arrange; .* 'transfrom' a misspelling of transform"):
        make_handler(Neither)
    with capture_logs() as logs:
        make_handler(Unused)
    assert [entry["hooks"] for entry in logs] == [["on_task_complete"]]
