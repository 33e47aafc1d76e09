"""What a triggerer does with the triggers of deferred tasks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID, UPSTREAMS, Upstream
from tests.services.triggerer.task_store import TaskStore
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.triggers.task_triggers import ClaimKey
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.tasks import folder_code
from tidemill.services.triggerer.tasks.host import TaskHost
from tidemill.services.triggerer.tasks.logs import TaskLogs
from tidemill.services.triggerer.tasks.source import TaskSource
from tidemill.store.calls.service_calls import BeatSession, BeginSession, TrialKind
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.trigger_calls import (
    ClaimTriggers,
    FailTrigger,
    ReleaseTriggers,
    StoreEvents,
    TriggererLoadRecord,
)
from tidemill.triggers.base import BaseTrigger, TriggerEvent

LEASE = ServiceLease()


class Triggerers:
    """Triggerers over one store."""

    def __init__(self, folder: Any) -> None:
        self.store = TaskStore()
        self.folder = folder
        self.running: dict[TaskHost, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def make(self, capacity: int = 10_000, lease: ServiceLease = LEASE, trial: TrialKind = TrialKind.NONE) -> TaskHost:
        about = BeginSession("triggerer", "t", "here", "boot", 1, (), capacity, trial=trial)
        return TaskHost(
            self.store,
            TriggererSettings(),
            about,
            folder_code.FolderCode(self.folder),
            65_536,
            KnownSecrets(),
            lease=lease,
        )

    def start(self, capacity: int = 10_000, lease: ServiceLease = LEASE) -> TaskHost:
        host = self.make(capacity, lease)
        stop = asyncio.Event()
        self.running[host] = asyncio.create_task(host.run(stop)), stop
        return host

    async def stop(self, host: TaskHost) -> None:
        task, stop = self.running.pop(host)
        stop.set()
        await asyncio.wait_for(task, 30)


@pytest.fixture
async def triggerers(monkeypatch, tmp_path) -> AsyncIterator[Triggerers]:
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.5)
    monkeypatch.syspath_prepend(str(tmp_path))
    DID.clear()
    UPSTREAMS.clear()
    made = Triggerers(tmp_path)
    yield made
    for host in list(made.running):
        await made.stop(host)
    DID.clear()


def did(one: Any) -> list[str]:
    return DID[one.claim.id]


async def test_the_first_event_resumes_the_task_and_the_trigger_ends_cleaned_up_and_not_killed(triggerers):
    one = triggerers.store.defer(hosted.Counting, count=3, then="wait")
    triggerers.start()

    await until(lambda: did(one)[-1:] == ["cleanup"])

    assert one.payload == {"n": 0}
    assert did(one) == ["run", "cleanup"]
    assert [len(r.events) for r in triggerers.store.requests if isinstance(r, StoreEvents)] == [1]


@pytest.mark.parametrize(
    ("cls", "kwargs", "error"),
    [
        (hosted.Raising, {}, 'in run\n    raise OSError("the upstream is gone")'),
        (hosted.Silent, {}, "ended without having fired an event"),
        (hosted.Undescribable, {}, "the payload of an event cannot be written as JSON"),
        (hosted.WrongEvent, {}, "must yield TriggerEvents, not dict"),
        (hosted.Exiting, {}, "SystemExit: 3"),
        (hosted.Refusing, {}, "ValueError: not today"),
        (hosted.Nested, {}, "CancelledError"),
        (hosted.Counting, {"cuont": 1}, "cuont"),
        ("no.such.Trigger", {}, "no module 'no'"),
    ],
)
async def test_a_trigger_that_ends_without_an_event_fails_its_task_and_no_other(triggerers, cls, kwargs, error):
    bad = triggerers.store.defer(cls, **kwargs)
    good = triggerers.store.defer(hosted.Counting)
    triggerers.start()

    await until(lambda: bad.error and good.resumed)

    assert error in bad.error
    assert "hunter2secret" not in bad.error
    await until(lambda: any(error in line.text for line in triggerers.store.lines(bad)))
    assert "on_kill" not in did(bad)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("user", ["run", "on_kill", "cleanup"]),
        ("timeout", ["run", "cleanup"]),
        ("done", ["run", "cleanup"]),
        ("failed", ["run", "cleanup"]),
    ],
)
async def test_only_a_user_has_the_work_of_a_trigger_ended(triggerers, reason, told):
    one = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    triggerers.start()
    await until(lambda: did(one) == ["run", "yielded"])
    did(one).remove("yielded")

    triggerers.store.stop(one, reason)

    await until(lambda: did(one) == told)
    assert one.error is None


async def test_a_stop_gives_triggers_up_and_the_next_triggerer_runs_them(triggerers):
    one = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    first = triggerers.start()
    await until(lambda: "yielded" in did(one))

    await triggerers.stop(first)

    assert did(one) == ["run", "yielded", "cleanup"]
    assert (one.error, one.stop, one.session) == (None, None, None)
    assert triggerers.store.ended == [1]
    triggerers.start()
    await until(lambda: did(one).count("run") == 2)


async def test_a_trigger_that_is_slow_to_clean_up_keeps_no_other_from_the_next_triggerer(triggerers, monkeypatch):
    gate = asyncio.Event()
    monkeypatch.setattr(hosted.StubbornKill, "cleanup", lambda self: gate.wait())
    slow = triggerers.store.defer("tests.services.triggerer.hosted.StubbornKill", count=0, then="wait")
    other = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    first = triggerers.start()
    await until(lambda: "yielded" in did(other) and "yielded" in did(slow))

    stopping = asyncio.create_task(triggerers.stop(first))
    await until(lambda: other.session is None)

    assert slow.session == 1
    gate.set()
    await stopping
    assert slow.session is None


async def test_a_triggerer_whose_service_was_ended_gives_up_what_it_runs_and_begins_another(triggerers):
    one = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    triggerers.start(lease=ServiceLease(0.3))
    await until(lambda: "yielded" in did(one))

    triggerers.store.lose(1)

    await until(lambda: did(one).count("run") == 2)
    assert did(one) == ["run", "yielded", "cleanup", "run", *did(one)[4:]]
    assert (one.session, one.error) == (2, None)


async def test_one_trigger_that_another_triggerer_has_taken_is_given_up_alone(triggerers):
    mine, taken = (triggerers.store.defer(hosted.Counting, count=0, then="wait") for _ in range(2))
    triggerers.start()
    await until(lambda: "yielded" in did(mine) and "yielded" in did(taken))

    taken.token, taken.session = 9, 77
    triggerers.store.ring()

    await until(lambda: did(taken) == ["run", "yielded", "cleanup"])
    assert did(mine) == ["run", "yielded"]


@pytest.mark.parametrize("kind", [ClaimTriggers, StoreEvents, FailTrigger, AppendLog, BeginSession])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_whatever_answer_is_lost_each_task_is_resumed_or_failed_once(triggerers, kind, when):
    failures: Counter[type] = Counter()

    def fail(request: Any) -> str | None:
        if isinstance(request, kind) and failures[kind] < 3:
            failures[kind] += 1
            return when
        return None

    triggerers.store.fail = fail
    good = [triggerers.store.defer(hosted.Counting) for _ in range(5)]
    bad = [triggerers.store.defer(hosted.Raising) for _ in range(5)]
    triggerers.start()

    await until(lambda: all(one.resumed for one in good) and all(one.error for one in bad))
    await until(lambda: failures[kind] == 3 and all(len(triggerers.store.lines(one)) == 1 for one in bad))

    assert all(one.claims == 1 for one in (*good, *bad))
    assert [did(one).count("run") for one in good] == [1] * 5


async def test_no_more_run_at_once_than_there_is_room_for(triggerers):
    some = [triggerers.store.defer(hosted.Counting, count=0, then="wait") for _ in range(5)]
    triggerers.start(capacity=2)
    await until(lambda: sum("yielded" in did(one) for one in some) == 2)

    for one in some[:2]:
        triggerers.store.stop(one, "user")

    await until(lambda: sum("yielded" in did(one) for one in some) == 4)
    assert sum(one.session is not None for one in some[2:]) == 2


class Talking(BaseTrigger):
    """Says something in all ways that there are."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.test_task_host.Talking", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        import logging

        self.log.info("about %s", "that", n=1)
        print("printed\nby", self.task_instance.task_id)
        logging.getLogger("a.hook").warning("of a hook: %d", 7)
        await asyncio.to_thread(print, "in a thread")
        print("of an error", file=sys.stderr)
        try:
            raise ValueError("caught, password=hunter2")
        except ValueError:
            self.log.exception("it went wrong")
        yield TriggerEvent(self.task_instance.try_number)

    async def cleanup(self) -> None:
        self.log.info("cleaned up")


async def test_what_a_trigger_says_is_in_the_log_of_its_task_and_in_no_other(triggerers, capsys):
    from tidemill.services.triggerer.tasks.output import route_output

    with route_output():
        some = [triggerers.store.defer("tests.services.triggerer.test_task_host.Talking") for _ in range(2)]
        triggerers.start()
        await until(lambda: all(len(triggerers.store.lines(one)) > 7 for one in some))
        print("of nobody")

    for one in some:
        lines = triggerers.store.lines(one)
        assert [(line.level, line.text) for line in lines[:6]] == [
            ("info", "about that n=1"),
            ("info", "printed"),
            ("info", f"by {one.claim.task_id}"),
            ("warning", "of a hook: 7"),
            ("info", "in a thread"),
            ("warning", "of an error"),
        ]
        assert lines[6].level == "error"
        assert lines[6].text.startswith("it went wrong\nTraceback")
        assert "hunter2" not in lines[6].text
        assert lines[7].text == "cleaned up"
        assert {line.source for line in lines} == {"trigger"}
    said = capsys.readouterr().out
    assert said.endswith("of nobody\n")
    assert "of a hook" not in said
    assert "printed" not in said


class Asking(BaseTrigger):
    """Reads a variable, on a thread and on the loop."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.test_task_host.Asking", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from tidemill.dags.context.variable import Variable

        found = await asyncio.to_thread(Variable.get, "place")
        try:
            Variable.get("place")
        except Exception as error:
            yield TriggerEvent([found, str(error)])


async def test_a_trigger_reads_variables_on_a_thread_and_is_told_so_where_it_would_block_the_loop(triggerers):
    triggerers.store.variables["place"] = "here"
    one = triggerers.store.defer("tests.services.triggerer.test_task_host.Asking")
    triggerers.start()

    await until(lambda: one.resumed)

    assert one.payload[0] == "here"
    assert "asyncio.to_thread(Variable.get, 'place')" in one.payload[1]


class Telling(BaseTrigger):
    """Says a secret variable in pieces, and fails with it."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.test_task_host.Telling", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from tidemill.dags.context.variable import Variable

        found = await asyncio.to_thread(Variable.get, "api_key")
        print("it is", found[:6], sep="", end="", flush=True)
        await asyncio.sleep(0.6)
        print(found[6:])
        raise ConnectionError("x" * 480 + found)
        yield


async def test_what_a_trigger_was_told_in_confidence_is_masked_in_its_log_and_its_error(triggerers):
    from tidemill.services.triggerer.tasks.output import route_output

    triggerers.store.variables["api_key"] = "T0psecretpw"
    one = triggerers.store.defer("tests.services.triggerer.test_task_host.Telling")
    with route_output():
        triggerers.start()
        await until(lambda: one.error and len(triggerers.store.lines(one)) > 2)

    assert "x***" in one.error
    assert "T0p" not in one.error
    texts = [line.text for line in triggerers.store.lines(one)]
    assert texts[:2] == ["it is", "***"]
    assert "T0p" not in "".join(texts)


async def test_triggers_with_one_key_share_a_stream_and_what_one_has_taken_is_acknowledged(triggerers):
    upstream = UPSTREAMS["up"] = Upstream("up")
    even, third = (triggerers.store.defer(hosted.Sharing, "up", upstream="up", modulo=n) for n in (2, 3))
    triggerers.start()
    await until(lambda: DID["up"] == ["open"])

    for n in (1, 2, 3):
        upstream.items.put_nowait(n)

    await until(lambda: even.resumed and third.resumed)
    assert (even.payload, third.payload) == (2, 3)
    await until(lambda: DID["up"] == ["open", "close"])
    assert [position for position, _ in upstream.advanced][:2] == [1, 2]


async def test_what_resumed_the_last_task_of_a_stream_is_acknowledged(triggerers):
    upstream = UPSTREAMS["up"] = Upstream("up")
    some = [triggerers.store.defer(hosted.Sharing, "up", upstream="up", modulo=2) for _ in range(2)]
    triggerers.start()
    upstream.items.put_nowait(1)
    upstream.items.put_nowait(2)

    await until(lambda: all(one.resumed for one in some))
    await until(lambda: DID["up"] == ["open", "close"])

    assert upstream.advanced == [(1, (2, 0, 0)), (2, (2, 0, 0))]


async def test_a_change_of_the_code_of_triggers_takes_effect_with_the_next_one(triggerers):
    code = triggerers.folder / "watched_by_triggers.py"
    text = (
        "from tidemill.triggers.base import BaseTrigger, TriggerEvent\n"
        "class Own(BaseTrigger):\n"
        "    def serialize(self):\n        return 'watched_by_triggers.Own', {}\n"
        "    async def run(self):\n        yield TriggerEvent('first')\n"
    )
    code.write_text(text)
    triggerers.start()
    first = triggerers.store.defer("watched_by_triggers.Own")
    await until(lambda: first.resumed)

    code.write_text(text.replace("first", "the second"))
    second = triggerers.store.defer("watched_by_triggers.Own")

    await until(lambda: second.resumed)
    assert (first.payload, second.payload) == ("first", "the second")


async def test_a_module_that_takes_long_to_import_keeps_no_other_trigger_waiting(triggerers):
    gate = triggerers.folder / "gate"
    (triggerers.folder / "slow_trigger_module.py").write_text(
        "import os, time\nfrom tests.services.triggerer.hosted import Counting\n"
        f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
        "class Slow(Counting):\n    pass\n"
    )
    triggerers.start()
    slow = triggerers.store.defer("slow_trigger_module.Slow")
    quick = triggerers.store.defer(hosted.Counting)

    await until(lambda: quick.resumed)

    assert not slow.resumed
    gate.touch()
    await until(lambda: slow.resumed)


async def test_all_triggers_of_a_stream_subscribe_before_its_first_poll_though_one_is_slow_to_import(triggerers):
    gate = triggerers.folder / "gate"
    (triggerers.folder / "slow_stream_module.py").write_text(
        "import os, time\nfrom tests.services.triggerer.hosted import Sharing\n"
        f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
        "class Slow(Sharing):\n    pass\n"
    )
    upstream = UPSTREAMS["up"] = Upstream("up")
    upstream.items.put_nowait(3)
    upstream.items.put_nowait(2)
    store = triggerers.store
    quick = store.defer(hosted.Sharing, "up", upstream="up", modulo=2)
    slow = store.defer("slow_stream_module.Slow", "up", upstream="up", modulo=3)
    triggerers.start()
    await until(lambda: sum(isinstance(request, ClaimTriggers) for request in store.requests) > 2)
    gate.touch()
    await until(lambda: quick.resumed and slow.resumed)
    assert (quick.payload, slow.payload) == (2, 3)


async def test_triggers_of_a_stream_that_are_handed_over_acknowledge_nothing_that_one_of_them_has_not_read(triggerers):
    upstream = UPSTREAMS["up"] = Upstream("up")
    store = triggerers.store
    shared = [
        store.defer(hosted.Sharing, "up", upstream="up", modulo=2, stuck_on=1, deaf=True),
        store.defer(hosted.Sharing, "up", upstream="up", modulo=7),
    ]
    alone = [store.defer(hosted.Counting, count=0, then="wait") for _ in range(2)]
    triggerers.start(lease=ServiceLease(1.2))
    await until(lambda: all("yielded" in did(one) for one in alone))
    upstream.items.put_nowait(1)
    upstream.items.put_nowait(2)
    await until(lambda: upstream.pulled == [1, 2])
    store.holds = True
    store.loads = [TriggererLoadRecord(0, 10)]

    await until(lambda: all(one.session is None for one in shared))
    await until(lambda: DID["up"] == ["open", "close"])

    assert upstream.advanced == []


@pytest.mark.parametrize("kind", [TrialKind.SPLIT, TrialKind.WHOLE])
async def test_a_trial_of_a_part_of_a_stream_acknowledges_nothing(triggerers, kind):
    upstream = UPSTREAMS["up"] = Upstream("up")
    one = triggerers.store.defer(hosted.Sharing, "up", upstream="up", modulo=2)
    session = await triggerers.store.call(BeginSession("triggerer", "t", "here", "boot", 1, trial=kind))
    trial = asyncio.create_task(triggerers.make(trial=kind).try_out(session, 60.0, asyncio.Event()))
    upstream.items.put_nowait(1)
    upstream.items.put_nowait(2)

    await until(lambda: one.resumed)
    await asyncio.wait_for(trial, 60)

    assert upstream.closed == 1
    assert upstream.advanced == ([] if kind is TrialKind.SPLIT else [(1, (1, 0, 0)), (2, (1, 0, 0))])


async def test_on_kill_of_a_trigger_whose_triggerer_is_gone_is_called_on_a_new_instance(triggerers):
    one = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    one.stop, one.claim = "user", msgspec.structs.replace(one.claim, kill=7)
    bad = triggerers.store.defer("no.such.Trigger")
    bad.stop, bad.claim = "user", msgspec.structs.replace(bad.claim, kill=8)
    triggerers.store.kill_claims = [one.claim, bad.claim]
    triggerers.start()

    await until(lambda: len(triggerers.store.kills) == 2)

    assert did(one) == ["on_kill", "cleanup"]
    (_, called), (_, failed) = sorted(triggerers.store.kills)
    assert called is None
    assert "no module 'no'" in failed


async def test_an_on_kill_that_the_stop_of_its_triggerer_cuts_off_is_not_reported(triggerers):
    one = triggerers.store.defer(hosted.SlowEnd, count=0, then="wait")
    one.stop = "user"
    triggerers.store.kill_claims = [msgspec.structs.replace(one.claim, kill=7)]
    hosted.RELEASED.clear()
    host = triggerers.start()
    await until(lambda: "on_kill" in did(one))
    await triggerers.stop(host)
    assert triggerers.store.kills == []


async def test_a_full_triggerer_calls_on_kill_of_triggers_whose_triggerer_is_gone(triggerers):
    busy = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    triggerers.start(capacity=1, lease=ServiceLease(1.2))
    await until(lambda: "yielded" in did(busy))
    one = triggerers.store.defer(hosted.Counting, count=0, then="wait")
    one.stop = "user"
    triggerers.store.kill_claims = [msgspec.structs.replace(one.claim, kill=7)]

    await until(lambda: triggerers.store.kills == [(7, None)])

    assert "on_kill" in did(one)


async def test_triggers_are_claimed_once_the_time_of_the_store_is_known(triggerers, monkeypatch):
    store, claims = triggerers.store, []
    call = store.call

    async def call_slowly(request: Any) -> Any:
        if isinstance(request, BeatSession):
            for _ in range(100):
                await asyncio.sleep(0)
            claims.append(sum(isinstance(one, ClaimTriggers) for one in store.requests))
        return await call(request)

    monkeypatch.setattr(store, "call", call_slowly)
    one = store.defer(hosted.Counting, count=0, then="wait")
    triggerers.start()

    await until(lambda: did(one))

    assert claims[0] == 0


async def test_a_machine_that_was_suspended_acknowledges_nothing_before_the_next_heartbeat(monkeypatch):
    store = TaskStore()
    session = await store.call(BeginSession("triggerer", "t", "here", "boot", 1))
    source = TaskSource(store, session, 1, (), TaskLogs(store, 65_536, KnownSecrets()))
    assert await source.wait_leased()
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: now_ns + 3600 * 10**9)
    assert not await source.wait_leased()


async def test_a_trial_of_more_triggers_than_there_is_room_for_ends_in_time():
    store = TaskStore()
    for _ in range(2):
        store.defer(hosted.Counting, count=0, then="wait")
    session = await store.call(BeginSession("triggerer", "t", "here", "boot", 1))
    source = TaskSource(store, session, 1, (), TaskLogs(store, 65_536, KnownSecrets()), reserved=True)
    assert [len(await source.claim()) for _ in range(2)] == [1, 0]
    await asyncio.wait_for(source.wait_over(0.01), 5)


async def test_a_trigger_that_starts_its_task_joins_no_stream_that_is_being_handed_over():
    store = TaskStore()
    for stream in ("up", "up", None, None):
        store.defer(hosted.Counting, stream, count=0, then="wait")
    session = await store.call(BeginSession("triggerer", "t", "here", "boot", 1))
    now = [0.0]
    source = TaskSource(store, session, 10, (), TaskLogs(store, 65_536, KnownSecrets()), lambda: now[0])
    units = [(one.stream_key, ClaimKey(one.id, one.token)) for one in await source.claim()]
    assert await source.place([(5, 1, "up"), (6, 1, "other")]) == set()
    now[0], store.loads = 60.0, [TriggererLoadRecord(0, 10)]
    assert len(await source.choose_moves(lambda: units)) == 2
    assert await source.place([(5, 1, "up"), (6, 1, "other")]) == {5}


async def test_a_triggerer_far_above_the_others_hands_triggers_over_cleaned_up_and_not_killed(triggerers):
    store = triggerers.store
    some = [store.defer(hosted.Counting, count=0, then="wait") for _ in range(4)]
    triggerers.start(lease=ServiceLease(1.2))
    await until(lambda: all("yielded" in did(one) for one in some))
    store.holds = True
    store.loads = [TriggererLoadRecord(0, 10)]

    await until(lambda: sum(one.session is None for one in some) == 2)

    store.loads = [TriggererLoadRecord(2, 10)]
    given = [one for one in some if one.session is None]
    assert all(did(one)[-1] == "cleanup" and "on_kill" not in did(one) for one in given)
    released = [request for request in store.requests if isinstance(request, ReleaseTriggers)]
    assert [(len(one.triggers), one.killed, one.moves) for one in released] == [(2, (), True)]
