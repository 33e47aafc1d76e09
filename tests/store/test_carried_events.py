"""Events of acknowledged streams that a try has not handled: the next one gets them, unless they are discarded."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.size import sized
from tests.store.dags import Player
from tests.store.test_streams import Stream

from tidemill.core.tasks.endings import Deferral, Failure, Idle, Loss, Success
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks, TaskHistory
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.service_calls import LoseSession
from tidemill.store.calls.stream_calls import KeepBatch, StreamWant, TakeEvents
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES, GetTaskState, GetValuePage, GetXCom
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.database import Database


class Carrying(Stream):
    """A task that reads an acknowledged stream, in several tries."""

    async def take_from(self, trigger: int, after: int, limit: int = 100) -> list[str]:
        (batch,) = await self.store.call(TakeEvents((StreamWant(trigger, after, limit),)))
        return [one.payload for one in batch.events]

    async def keep_earlier(
        self, attempt: ClaimedAttempt, trigger: int, handled: int, number: int, **values: Any
    ) -> None:
        assert attempt.stream is not None
        own = attempt.stream.trigger
        await self.store.call(KeepBatch(attempt.task, attempt.epoch, trigger, handled, number, current=own, **values))

    async def defer_again(self, *, acked: bool = True) -> None:
        """Have the next try begin, which waits for a trigger of its own."""
        attempt = await self.player.claim_one()
        assert attempt.stream is None
        await self.player.report(attempt, Deferral("mod.Trigger", "{}", "", streams=True, acked=acked))
        self.trigger = await self.claim_trigger()

    async def clear(self) -> None:
        await self.store.call(ClearTasks(self.run.dag_id, self.run.run_id, ("a",), "tester"))

    async def details(self) -> list[str]:
        listed = await self.store.call(TaskHistory(self.run.dag_id, self.run.run_id, "a"))
        return [one.detail for one in listed.rows if one.detail is not None]


@pytest.fixture
async def stream(database: Database) -> Carrying:
    return Carrying(Player(database))


@pytest.mark.parametrize("how", ["failure", "clear"])
async def test_events_that_a_try_has_not_handled_come_first_in_the_next_one(stream: Carrying, how: str) -> None:
    await stream.begin(acked=True)
    await stream.fire("0", "1", "2")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, checkpoint='"x"')
    first = stream.trigger.id
    await stream.player.report(attempt, Failure("it broke"))
    if how == "clear":
        await stream.clear()
    about = await stream.about()
    assert (about.trigger, about.received, about.handled, about.undelivered) == (first, 3, 1, 2)
    await stream.defer_again()
    about = await stream.about()
    assert (about.trigger, about.received, about.undelivered, about.carried) == (stream.trigger.id, 0, 0, 2)
    # They resume the task, before its own trigger has fired.
    attempt = await stream.player.claim_one()
    assert attempt.stream is not None
    assert (attempt.stream.carried, [(one.trigger, one.handled, one.kept) for one in attempt.stream.earlier]) == (
        2,
        [(first, 1, 1)],
    )
    await stream.fire("own")
    assert await stream.take_from(first, 1, 1) == ["1"]
    await stream.keep_earlier(attempt, first, 2, 2, emitted=(('"e"', None),), checkpoint='"y"')
    await stream.player.report(attempt, Loss())
    attempt = await stream.player.claim_one()
    assert attempt.stream is not None
    assert (attempt.stream.handled, attempt.stream.checkpoint) == (0, '"y"')
    assert [(one.trigger, one.handled, one.kept) for one in attempt.stream.earlier] == [(first, 2, 2)]
    await stream.keep_earlier(attempt, first, 3, 3)
    assert await stream.take_from(stream.trigger.id, 0) == ["own"]
    await stream.keep(attempt, 1, 1)
    await stream.player.report(attempt, Idle())
    assert (await stream.states())["a"] == "deferred", "nothing is left"
    await stream.end()
    attempt = await stream.player.claim_one()
    assert attempt.stream is not None
    assert attempt.stream.earlier == ()
    await stream.player.report(attempt, Success())
    about = await stream.about()
    assert (about.handled, about.undelivered, about.carried, about.discarded) == (1, 0, 0, 0)


async def test_a_try_that_gives_its_worker_back_before_the_events_of_the_last_one_goes_on_with_them(
    stream: Carrying,
) -> None:
    await stream.begin(acked=True)
    await stream.fire("0")
    await stream.player.report(await stream.player.claim_one(), Failure("it broke"))
    await stream.defer_again()
    attempt = await stream.player.claim_one()
    await stream.player.report(attempt, Idle())
    assert (await stream.states())["a"] == "scheduled"


async def test_events_that_may_come_again_from_upstream_are_not_delivered_again(stream: Carrying) -> None:
    await stream.begin()
    await stream.fire("0")
    await stream.player.report(await stream.player.claim_one(), Failure("it broke"))
    await stream.defer_again(acked=False)
    assert (await stream.about()).carried == 0
    assert not await stream.player.claim()


async def test_a_stop_discards_the_events_of_all_tries(stream: Carrying) -> None:
    await stream.begin(is_generator=False, acked=True)
    await stream.fire("0", "1", "2")
    first = stream.trigger.id
    await stream.player.report(await stream.player.claim_one(), Failure("it broke"))
    await stream.defer_again()
    await stream.fire("3", "4")
    attempt = await stream.player.claim_one()
    await stream.keep_earlier(attempt, first, 1, 1, stops=True)
    assert await stream.fire("5") == ["fenced"]
    about = await stream.about()
    assert (about.handled, about.undelivered, about.carried) == (0, 0, 0)
    assert (about.discarded, about.discarded_for) == (4, "STOP")
    await stream.player.report(attempt, Loss())
    attempt = await stream.player.claim_one()
    assert attempt.stream is not None
    assert (attempt.stream.earlier, await stream.take_from(attempt.stream.trigger, attempt.stream.handled)) == ((), [])
    await stream.player.report(attempt, Success())
    await stream.clear()
    await stream.defer_again()
    assert (await stream.about()).carried == 0


@pytest.mark.parametrize(("how", "reason"), [("mark", "marked by a user"), ("cancel", "the run was cancelled")])
async def test_a_mark_and_a_cancelled_run_discard_them_and_say_so(stream: Carrying, how: str, reason: str) -> None:
    await stream.begin(acked=True)
    await stream.fire("0", "1", "2")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1)
    if how == "mark":
        await stream.store.call(MarkTasks(stream.run.dag_id, stream.run.run_id, ("a",), "success", "tester"))
    else:
        await stream.store.call(CancelRun(stream.run.dag_id, stream.run.run_id, "tester"))
    assert (await stream.about()).undelivered == 2, "a clear may still follow"
    await stream.player.turn()
    await stream.clean_up()
    assert (await stream.states())["a"] == ("success" if how == "mark" else "failed")
    about = await stream.about()
    assert (about.handled, about.undelivered, about.discarded, about.discarded_for) == (1, 0, 2, reason)
    said = f"2 undelivered events of trigger run {stream.trigger.id} were discarded (1 to 2)"
    assert [one for one in await stream.details() if said in one]


@pytest.mark.parametrize("first", ["worker", "trigger"])
@pytest.mark.parametrize("gone", [False, True])
async def test_a_stream_that_is_cleared_waits_for_its_process_and_for_its_trigger(
    stream: Carrying, first: str, gone: bool
) -> None:
    await stream.begin(acked=True)
    await stream.fire("0")
    await stream.player.claim_one()
    await stream.clear()

    async def end_trigger() -> None:
        if gone:
            await stream.store.call(LoseSession(stream.triggerer))
        else:
            await stream.clean_up()

    steps = [stream.player.turn, end_trigger]
    for step in steps if first == "worker" else reversed(steps):
        assert (await stream.states())["a"] == "ending"
        await step()
    await stream.player.schedule()
    assert (await stream.states())["a"] == "queued"


async def test_what_is_emitted_at_the_end_of_a_stream_is_stored_once_although_the_attempt_is_lost(
    stream: Carrying,
) -> None:
    await stream.begin(acked=True)
    await stream.fire("0")
    await stream.end()
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1)
    await stream.keep(attempt, 1, 2, emitted=(('"total"', None),), final=True)
    await stream.player.report(attempt, Loss())
    again = await stream.player.claim_one()
    await stream.keep(again, 1, 3, emitted=(('"total"', None),), final=True)
    await stream.player.report(again, Success())
    page = await stream.store.call(GetValuePage(stream.run.id, "a"))
    assert [value for _, value in page.values] == ['"total"']


async def test_what_a_handler_writes_is_stored_with_its_batch_or_not_at_all(stream: Carrying) -> None:
    await stream.begin(acked=True)
    await stream.fire("0", "1")
    attempt = await stream.player.claim_one()
    await stream.keep(attempt, 1, 1, xcoms=(("x", "1"),), states=(("a", "1"), ("b", "2")))
    await stream.keep(attempt, 2, 2, states=(("b", None), ("c", "3")), clears_state=True)
    await stream.keep(attempt, 2, 3, states=(("c", None), ("d", "4")))

    async def read(key: str) -> str | None:
        return await stream.store.call(GetTaskState(attempt.task, attempt.epoch, key))

    assert [await read(key) for key in "abcd"] == [None, None, None, "4"]
    assert await stream.store.call(GetXCom(stream.run.id, ("a",), "x")) == ("1",)
    for refused in ({"states": (("k\0", "1"),)}, {"states": (("k", "x" * (MAX_XCOM_BYTES + 1)),)}):
        with pytest.raises(CallRefusedError) as error:
            await stream.keep(attempt, 2, 4, **refused)
        assert error.value.kind is RefusalKind.INVALID


@pytest.mark.parametrize("seed", range(sized(2, 8)))
async def test_in_any_order_of_tries_each_event_is_handled_once_or_discarded(stream: Carrying, seed: int) -> None:
    random = Random(seed)
    await stream.begin(acked=True)
    attempt: ClaimedAttempt | None = None
    fired = 0
    handled: list[int] = []
    kept: dict[int, int] = {}
    lost = 0

    async def advance() -> None:
        """Bring the task to an attempt that handles its stream, if it can go on."""
        nonlocal attempt
        for _ in range(3):
            found = next(iter(await stream.player.claim()), None)
            if found is None:
                return
            if found.stream is not None:
                attempt = found
                return
            await stream.player.report(found, Deferral("mod.Trigger", "{}", "", streams=True, acked=True))
            stream.trigger = await stream.claim_trigger()

    async def handle(*, stops: bool = False) -> int:
        """Handle a batch as an attempt does: those of earlier tries come first."""
        assert attempt is not None
        assert attempt.stream is not None
        for one in attempt.stream.earlier:
            done = kept.get(one.trigger, one.handled)
            payloads = await stream.take_from(one.trigger, done, random.randint(1, 3))
            if payloads:
                numbers[one.trigger] = numbers.get(one.trigger, one.kept) + 1
                kept[one.trigger] = done + len(payloads)
                await stream.keep_earlier(attempt, one.trigger, kept[one.trigger], numbers[one.trigger], stops=stops)
                handled.extend(map(int, payloads))
                return len(payloads)
        own = attempt.stream
        done = kept.get(own.trigger, own.handled)
        payloads = await stream.take_from(own.trigger, done, random.randint(1, 3))
        if payloads:
            numbers[own.trigger] = numbers.get(own.trigger, own.kept) + 1
            kept[own.trigger] = done + len(payloads)
            await stream.keep(attempt, kept[own.trigger], numbers[own.trigger], stops=stops)
            handled.extend(map(int, payloads))
        return len(payloads)

    numbers: dict[int, int] = {}
    steps = ["fire", "fire", "advance", "advance", "handle", "handle", "idle", "lose", "fail", "clear"]
    for _ in range(50):
        step = random.choice(steps)
        if step == "fire":
            outcome = await stream.fire(str(fired), identity=str(fired))
            fired += outcome == ["stored"]
        elif step == "advance" and attempt is None:
            await advance()
        elif step == "clear":
            await stream.clear()
            await stream.player.turn()
            await stream.clean_up()
            attempt, lost = None, 0
        elif attempt is None:
            continue
        elif step == "handle":
            await handle()
        elif step == "idle":
            await stream.player.report(attempt, Idle())
            attempt, lost = None, 0
        elif step == "lose" and lost < 4:
            await stream.player.report(attempt, Loss())
            attempt, lost = None, lost + 1
        elif step == "fail":
            await stream.player.report(attempt, Failure("it broke"))
            attempt, lost = None, 0
    for _ in range(6):
        if attempt is None and (await stream.states())["a"] == "failed":
            await stream.clear()
        if attempt is None:
            await advance()
    if attempt is not None:
        stops = seed % 2 == 1
        while not (stops and handled) and await handle():
            pass
        if stops:
            await handle(stops=True)
    assert handled == sorted(handled), "in order"
    assert len(set(handled)) == len(handled), "none twice"
    if attempt is None:
        return
    about = await stream.about()
    if seed % 2 == 0:
        assert handled == list(range(fired)), "none lost"
    assert about.undelivered == about.carried == 0 or seed % 2 == 1
