"""The streams of triggers: events that attempts take in batches, and keep."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, update
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.test_backlog import over

from tidemill.core.tasks.endings import Deferral, Failure, Idle, Loss, Success
from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.structure import TaskStructure
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.instance_calls import ClearTasks, ListTasks, StreamAbout
from tidemill.store.calls.service_calls import LoseSession, MapLimits
from tidemill.store.calls.stream_calls import EndStream, KeepBatch, ListTaskEvents, StreamBatch, StreamWant, TakeEvents
from tidemill.store.calls.task_calls import GetValuePage, GetXCom
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    CountUndelivered,
    EventEnding,
    EventOutcome,
    FailTrigger,
    FiredEvent,
    HeldTriggers,
    ReleaseTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind
from tidemill.store.database import Database
from tidemill.store.queries.triggers.retention import remove_events
from tidemill.store.tables import trigger_stream


class Stream:
    """A task that has deferred to a trigger that streams, and its triggerer."""

    def __init__(self, player: Player) -> None:
        self.player, self.store = player, player.store
        self.requests = itertools.count(1)

    async def begin(self, *others: TaskStructure, is_generator: bool = True, **limits: Any) -> Stream:
        await self.player.begin()
        self.triggerer = await self.player.begin_service("triggerer")
        follower = [task("b", "a")] if is_generator else []
        self.run = await self.player.create(
            dag(task("a", retries=1, retry_delay_us=0, is_generator=is_generator), *(others or follower))
        )
        first = await self.player.claim_one()
        await self.player.report(first, Deferral("mod.Trigger", "{}", "", streams=True, **limits))
        self.trigger = await self.claim_trigger()
        return self

    async def claim_trigger(self) -> ClaimedTrigger:
        (claimed,) = await self.store.call(ClaimTriggers(self.triggerer, next(self.requests), 10))
        assert claimed.streams
        return claimed

    async def fire(self, *payloads: str, identity: str | None = None) -> list[OutcomeKind]:
        return [one.kind for one in await self.store_events(*payloads, identity=identity)]

    async def store_events(
        self, *payloads: str, identity: str | None = None, ending: str | None = None, most: int = 0
    ) -> tuple[EventOutcome, ...]:
        """Store events, of which the last one may end the task."""
        last = len(payloads) - 1
        events = tuple(
            FiredEvent(self.trigger.id, self.trigger.token, one, identity, 1, ending if number == last else None)
            for number, one in enumerate(payloads)
        )
        return await self.store.call(StoreEvents(self.triggerer, next(self.requests), events, most))

    async def count_undelivered(self) -> int:
        ((_, undelivered),) = await self.store.call(CountUndelivered((self.trigger.id,)))
        return undelivered

    async def about(self) -> StreamAbout:
        listed = await self.store.call(ListTasks(self.run.dag_id, self.run.run_id, task_id="a"))
        (found,) = [one.stream for one in listed.rows]
        assert found is not None
        return found

    async def end(self, error: str | None = None) -> OutcomeKind:
        return await self.store.call(EndStream(self.triggerer, self.trigger.id, self.trigger.token, error))

    async def take(self, attempt: ClaimedAttempt, after: int, limit: int = 100) -> StreamBatch:
        assert attempt.stream is not None
        (batch,) = await self.store.call(TakeEvents((StreamWant(attempt.stream.trigger, after, limit),)))
        return batch

    async def keep(self, attempt: ClaimedAttempt, handled: int, number: int, **values: Any) -> None:
        assert attempt.stream is not None
        await self.store.call(KeepBatch(attempt.task, attempt.epoch, attempt.stream.trigger, handled, number, **values))

    async def clean_up(self) -> None:
        """Report that the trigger that the triggerer had to stop is gone."""
        await self.store.call(ReleaseTriggers(self.triggerer, ((self.trigger.id, self.trigger.token),)))

    async def states(self) -> dict[str, str]:
        return await self.player.states(self.run)


def _stream(attempt: ClaimedAttempt) -> tuple[int, int, str | None]:
    assert attempt.stream is not None
    return attempt.stream.handled, attempt.stream.kept, attempt.stream.checkpoint


@pytest.fixture
async def stream(database: Database) -> Stream:
    return Stream(Player(database))


async def test_one_attempt_handles_all_events_in_order_and_each_once(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    assert attempt.resume is not None
    batch = await stream.take(attempt, 0)
    assert [(one.sequence_index, one.payload) for one in batch.events] == [(0, "0"), (1, "1")]
    assert not batch.ended
    await stream.keep(attempt, 2, 1)
    await stream.fire("2")
    batch = await stream.take(attempt, 2)
    assert [one.payload for one in batch.events] == ["2"]
    await stream.keep(attempt, 3, 2)
    await stream.end()
    batch = await stream.take(attempt, 3)
    assert batch == StreamBatch(stream.trigger.id, ended=True)
    await stream.player.report(attempt, Success())
    assert (await stream.states())["a"] == "success"
    stopped = await stream.store.call(HeldTriggers(stream.triggerer, ((stream.trigger.id, stream.trigger.token),)))
    assert [one.reason for one in stopped] == ["done"]


async def test_a_task_without_events_leaves_its_worker_until_the_next_one(stream: Stream) -> None:
    await stream.begin()
    assert (await stream.states())["a"] == "deferred"
    await stream.fire("0")
    first = await stream.player.claim_one()
    await stream.keep(first, 1, 1)
    await stream.player.report(first, Idle())
    assert (await stream.states())["a"] == "deferred"
    assert not await stream.player.claim()
    await stream.fire("1", "2")
    second = await stream.player.claim_one()
    assert (*_stream(second), second.try_number) == (1, 1, None, 1)
    # The next event arrives just before the attempt leaves.
    await stream.keep(second, 3, 2)
    await stream.fire("3")
    await stream.player.report(second, Idle())
    assert (await stream.states())["a"] == "scheduled"
    third = await stream.player.claim_one()
    await stream.keep(third, 4, 3)
    await stream.player.report(third, Idle())
    await stream.end()
    fourth = await stream.player.claim_one()
    assert (await stream.take(fourth, 4)).ended


async def test_a_batch_that_was_not_kept_comes_again_and_one_that_was_kept_does_not(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, emitted=(('"x"', None),), checkpoint="7")
    await stream.keep(attempt, 1, 1, emitted=(('"x"', None),), checkpoint="7")
    await stream.player.report(attempt, Loss())
    with pytest.raises(CallRefusedError):
        await stream.keep(attempt, 2, 2)
    again = await stream.player.claim_one()
    assert _stream(again) == (1, 1, "7")
    assert [one.payload for one in (await stream.take(again, 1)).events] == ["1"]


async def test_a_failed_try_ends_the_stream_and_the_next_begins_its_own(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.player.report(attempt, Failure("it broke"))
    assert await stream.fire("1") == ["fenced"]
    assert await stream.end() is OutcomeKind.FENCED
    second = await stream.player.claim_one()
    assert (second.try_number, second.stream) == (2, None)


async def test_an_error_of_the_trigger_follows_the_events_before_it(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    await stream.end("ValueError: no")
    attempt = await stream.player.claim_one()
    batch = await stream.take(attempt, 0, limit=1)
    assert (len(batch.events), batch.ended, batch.error) == (1, True, "ValueError: no")


@pytest.mark.parametrize("limits", [{"timeout_us": 1}, {"idle_us": 1}])
async def test_a_stream_without_an_event_in_time_fails_the_try(stream: Stream, limits: dict[str, int]) -> None:
    await stream.begin(**limits)
    await stream.player.schedule()
    assert (await stream.states())["a"] in ("up_for_retry", "scheduled", "queued")


async def test_elements_with_a_known_identity_are_emitted_once(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, emitted=(('"x"', "k"), ('"y"', None), ('"x"', "k")))
    await stream.keep(attempt, 1, 2, emitted=(('"x"', "k"), ('"y"', None)))
    page = await stream.store.call(GetValuePage(attempt.run, "a"))
    assert [value for _, value in page.values] == ['"x"', '"y"', '"y"']
    # A task that is cleared emits anew.
    await stream.store.call(ClearTasks(stream.run.dag_id, stream.run.run_id, ("a",), "tester"))
    await stream.player.turn(held=())
    await stream.clean_up()
    again = await stream.player.claim_one()
    await stream.player.report(again, Deferral("mod.Trigger", "{}", "", streams=True))
    stream.trigger = await stream.claim_trigger()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, emitted=(('"x"', "k"), ('"z"', None)))
    await stream.end()
    await stream.player.report(attempt, Success())
    page = await stream.store.call(GetValuePage(attempt.run, "a"))
    assert [value for _, value in page.values][:2] == ['"x"', '"z"']


async def test_a_trigger_that_its_triggerer_had_to_fail_ends_its_stream(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    failure = FailTrigger(stream.triggerer, stream.trigger.id, stream.trigger.token, "it blocked the loop")
    assert await stream.store.call(failure) is OutcomeKind.MOVED
    assert await stream.store.call(ClaimTriggers(stream.triggerer, next(stream.requests), 10)) == ()
    batch = await stream.take(await stream.player.claim_one(), 0)
    assert (len(batch.events), batch.ended, batch.error) == (1, True, "it blocked the loop")


async def test_after_a_stop_no_attempt_gets_another_event(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0", "1", "2")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, stops=True)
    assert await stream.fire("3") == ["fenced"]
    stopped = await stream.store.call(HeldTriggers(stream.triggerer, ((stream.trigger.id, stream.trigger.token),)))
    assert [one.reason for one in stopped] == ["done"]
    await stream.keep(attempt, 1, 2, emitted=(('"x"', None),))
    await stream.player.report(attempt, Loss())
    again = await stream.player.claim_one()
    assert again.stream is not None
    batch = await stream.take(again, again.stream.handled)
    assert (batch.events, batch.ended, batch.error) == ((), True, None)
    await stream.player.report(again, Success())
    assert (await stream.states())["a"] == "success"


async def test_a_mark_that_is_older_than_the_wait_of_its_task_does_not_resume_it(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1)
    await stream.player.report(attempt, Idle())

    def mark(connection: Connection) -> None:
        connection.execute(update(trigger_stream).values(ready=1))

    database: Any = stream.store
    await database.write(mark)
    assert not await stream.player.claim()
    assert (await stream.states())["a"] == "deferred"
    await stream.fire("1")
    assert (await stream.player.claim_one()).stream is not None


async def test_what_a_task_emits_that_is_no_source_becomes_its_result_and_is_forgotten_with_a_clear(
    stream: Stream,
) -> None:
    await stream.begin(is_generator=False)
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, emitted=(('"x"', "k"), ("[1]", None)))
    await stream.keep(attempt, 1, 2, lists=True)
    await stream.player.report(attempt, Success())
    assert await read_result(stream) == '["x",[1]]'
    await stream.store.call(ClearTasks(stream.run.dag_id, stream.run.run_id, ("a",), "tester"))
    again = await stream.player.claim_one()
    await stream.player.report(again, Deferral("mod.Trigger", "{}", "use", streams=True))
    stream.trigger = await stream.claim_trigger()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, emitted=(('"y"', "k"),), lists=True)
    await stream.player.report(attempt, Success())
    assert await read_result(stream) == '["y"]'


async def read_result(stream: Stream) -> str | None:
    (value,) = await stream.store.call(GetXCom(stream.run.id, ("a",), "return_value"))
    return value


@pytest.mark.parametrize("emitted", [('"x"', "k\0"), ('"x"', "k" * 2_000), ('"\ud800"', None)])
async def test_elements_that_databases_reject_are_refused_with_their_batch(
    stream: Stream, emitted: tuple[str, str | None]
) -> None:
    await stream.begin()
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    with pytest.raises(CallRefusedError) as refused:
        await stream.keep(attempt, 1, 1, emitted=(emitted,))
    assert refused.value.kind is RefusalKind.INVALID


async def test_old_events_that_were_not_handled_are_not_removed(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1)
    database: Any = stream.store
    await database.write(lambda connection: remove_events(connection, 1 << 60))
    assert [one.payload for one in (await stream.take(attempt, 0)).events] == ["1"]


async def test_a_checkpoint_stays_over_tries_and_is_forgotten_with_a_clear(stream: Stream) -> None:
    await stream.begin(is_generator=False)
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, checkpoint="7")
    await stream.player.report(attempt, Failure("it broke"))
    second = await stream.player.claim_one()
    assert (second.try_number, second.stream, second.checkpoint) == (2, None, "7")
    await stream.player.report(second, Deferral("mod.Trigger", "{}", "use", streams=True))
    stream.trigger = await stream.claim_trigger()
    await stream.fire("1")
    attempt = await stream.player.claim_one()
    assert (_stream(attempt), attempt.checkpoint) == ((0, 0, "7"), None)
    await stream.player.report(attempt, Failure("it broke again"))
    await stream.store.call(ClearTasks(stream.run.dag_id, stream.run.run_id, ("a",), "tester"))
    assert (await stream.player.claim_one()).checkpoint is None


@pytest.mark.parametrize("seed", range(sized(4, 12)))
async def test_in_any_order_each_event_is_handled_once_and_none_after_a_stop(stream: Stream, seed: int) -> None:
    random = Random(seed)
    await stream.begin()
    attempt: ClaimedAttempt | None = None
    fired = handled = kept = lost = 0
    stopped = False
    steps = ["fire", "fire", "claim", "claim", "handle", "handle", "idle", "lose", "replace", "stop"]
    for left in range(60, 0, -1):
        step = random.choice(steps[: -1 if left > 20 else None])
        if step == "fire":
            outcome = await stream.fire(str(fired), identity=str(fired))
            assert outcome == (["fenced"] if stopped else ["stored"])
            fired += not stopped
        elif step == "replace" and not stopped:
            await stream.store.call(LoseSession(stream.triggerer, is_death=False))
            stream.triggerer = await stream.player.begin_service("triggerer")
            stream.trigger = await stream.claim_trigger()
            if fired:
                assert await stream.fire("again", identity="0") == ["duplicate"]
        elif step == "claim" and attempt is None:
            attempt = next(iter(await stream.player.claim()), None)
            if attempt is not None:
                assert attempt.stream is not None
                kept = attempt.stream.kept
                assert stopped or attempt.stream.handled == handled
        elif attempt is None:
            continue
        elif step in ("handle", "stop") and not stopped:
            events = (await stream.take(attempt, handled, random.randint(1, 3))).events
            assert [int(one.payload) for one in events] == list(range(handled, handled + len(events)))
            if events:
                kept += 1
                emitted = tuple((one.payload, None) for one in events)
                await stream.keep(attempt, handled + len(events), kept, emitted=emitted, stops=step == "stop")
                handled += len(events)
                stopped = step == "stop"
        elif step == "idle" and not stopped:
            await stream.player.report(attempt, Idle())
            attempt, lost = None, 0
        elif step == "lose" and lost < 4:
            await stream.player.report(attempt, Loss())
            attempt, lost = None, lost + 1
            if stopped:
                (again,) = await stream.player.claim()
                assert again.stream is not None
                batch = await stream.take(again, again.stream.handled)
                assert (batch.events, batch.ended) == ((), True)
                break
    if not stopped:
        await stream.end()
        attempt = attempt or await stream.player.claim_one()
        batch = await stream.take(attempt, handled)
        assert batch.ended
        await stream.keep(attempt, fired, kept + 1, emitted=tuple((one.payload, None) for one in batch.events))
        handled = fired
    page = await stream.store.call(GetValuePage(stream.run.id, "a"))
    assert [int(value) for _, value in page.values] == list(range(handled))


async def test_a_trigger_with_too_many_undelivered_events_has_room_again_once_half_of_them_are_handled(
    stream: Stream,
) -> None:
    await stream.begin()
    outcomes = await stream.store_events("0", "1", "2", "3", "4", most=4)
    assert [one.undelivered for one in outcomes] == [5] * 5
    assert await stream.count_undelivered() == 5
    attempt = await stream.player.claim_one()
    bell = stream.store.doorbell
    await stream.keep(attempt, 2, 1)
    while await bell.wait(Channel.TRIGGERER, 0.05):
        pass
    await stream.keep(attempt, 3, 2)
    assert await bell.wait(Channel.TRIGGERER, 20.0)
    assert await stream.count_undelivered() == 2
    await stream.end()
    assert await stream.count_undelivered() == 0


async def test_events_wait_while_the_backlog_of_a_map_is_full(stream: Stream) -> None:
    stream.player.map_limits = MapLimits(max_backlog=4)
    await stream.begin(over("a", "e", max_outstanding=1))
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    # The map opens, and has its first element.
    await stream.keep(attempt, 1, 1, emitted=(('"x"', None),))
    await stream.player.schedule()
    await stream.keep(attempt, 1, 2, emitted=tuple((f'"{number}"', None) for number in range(6)))
    assert await stream.take(attempt, 1) == StreamBatch(stream.trigger.id, left=1)
    # The attempt leaves its worker, and neither the event that waits nor another one resumes the task.
    await stream.player.report(attempt, Idle(idle_us=1))
    await stream.fire("2")
    elements = await stream.player.claim()
    assert [one.task_id for one in elements] == ["e"]
    await stream.player.schedule()
    assert (await stream.states())["a"] == "deferred"
    resumed: list[ClaimedAttempt] = []
    for _ in range(12):
        reports = [AttemptReport(one.task, one.epoch, Success(), map_index=one.map_index) for one in elements]
        await stream.player.turn(*reports)
        claimed = await stream.player.claim()
        resumed += [one for one in claimed if one.task_id == "a"]
        elements = tuple(one for one in claimed if one.task_id == "e")
        if resumed:
            break
    (again,) = resumed
    assert again.try_number == 1
    assert [one.payload for one in (await stream.take(again, 1)).events] == ["1", "2"]


async def test_the_end_of_a_stream_does_not_wait_for_a_map(stream: Stream) -> None:
    stream.player.map_limits = MapLimits(max_backlog=2)
    await stream.begin(over("a", "e", max_outstanding=1))
    await stream.fire("0")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 0, 1, emitted=(("0", None),))
    await stream.player.schedule()
    await stream.keep(attempt, 0, 2, emitted=tuple((str(number), None) for number in range(9)))
    assert not (await stream.take(attempt, 0)).events
    await stream.keep(attempt, 1, 3)
    await stream.end()
    assert (await stream.take(attempt, 1)).ended


@pytest.mark.parametrize("state", ["success", "failed", "skipped"])
async def test_an_event_that_ends_the_task_follows_the_events_before_it(stream: Stream, state: str) -> None:
    await stream.begin()
    ending = EventEnding(state, "why", (("return_value", "7"),))
    outcomes = await stream.store_events("0", "1", "null", ending=msgspec.json.encode(ending).decode())
    assert [one.sequence_index for one in outcomes] == [0, 1, 2]
    attempt = await stream.player.claim_one()
    batch = await stream.take(attempt, 0, limit=1)
    assert ([one.payload for one in batch.events], batch.ended, batch.left) == (["0"], False, 1)
    await stream.keep(attempt, 1, 1)
    batch = await stream.take(attempt, 1)
    assert ([one.payload for one in batch.events], batch.ended, batch.ending) == (["1"], True, ending)
    await stream.keep(attempt, 2, 2)
    assert await stream.take(attempt, 2) == StreamBatch(stream.trigger.id, ended=True, ending=ending)
    # The trigger has ended: neither its end nor another event changes anything.
    assert await stream.end() is OutcomeKind.ALREADY
    await stream.fire("3")
    assert not (await stream.take(attempt, 2)).events
    assert (await stream.about()).received == 2


async def test_the_counts_cursor_and_events_of_a_stream_are_shown(stream: Stream) -> None:
    await stream.begin()
    await stream.fire("0")
    about = await stream.about()
    assert (about.trigger, about.received, about.handled, about.undelivered) == (stream.trigger.id, 1, 0, 1)
    await stream.fire('"1"', "2", identity=None)
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 2, 1, checkpoint='"page 2"')
    await stream.end("Traceback\nValueError: no")
    about = await stream.about()
    assert (about.received, about.handled, about.undelivered, about.checkpoint) == (3, 2, 1, '"page 2"')
    assert about.rate is not None
    assert about.ended
    assert about.error is not None
    assert about.error.endswith("ValueError: no")
    names = (stream.run.dag_id, stream.run.run_id, "a")
    page = await stream.store.call(ListTaskEvents(*names, limit=2))
    assert [(one.trigger_run_id, one.sequence_index, one.payload, one.is_last) for one in page.rows] == [
        (stream.trigger.id, 2, "2", True),
        (stream.trigger.id, 1, '"1"', False),
    ]
    page = await stream.store.call(ListTaskEvents(*names, after=page.next, limit=2))
    assert ([one.sequence_index for one in page.rows], page.next) == ([0], None)
    assert not (await stream.store.call(ListTaskEvents(*names[:2], "b"))).rows
