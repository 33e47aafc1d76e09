"""The SQS producer of a shared stream, and its trigger, over a server that speaks SQS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.triggers.producers.producer_contract import CLEAN, FAILED, REJECTED, Pulled
from tests.triggers.producers.sqs_server import SqsServer, moto_url, sqs_server
from tests.until import until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import free_port
from tidemill.triggers.builtin.sqs import SqsTrigger
from tidemill.triggers.producers import sqs as module
from tidemill.triggers.producers.sqs import SqsStreamProducer, sqs_stream
from tidemill.triggers.producers.sqs_client import PartialFailure, SqsCallError, SqsSettings
from tidemill.triggers.shared_stream import AckTimeout, AdvanceItem, AdvanceOutcome, SharedStreamManager, route

__all__ = ["moto_url", "sqs_server"]

UNSEEN = AdvanceOutcome(0, 0, 0)


class Opened(Pulled):
    """A producer that is pulled."""

    def __init__(self, producer: SqsStreamProducer) -> None:
        super().__init__(producer.open_stream(), producer.aclose)
        self.producer = producer

    async def advance(self, *items: Any, outcome: AdvanceOutcome = CLEAN) -> None:
        for _, held in items:
            await self.producer.advance([AdvanceItem(held, outcome)])


class Queues:
    """Queues of one test, and the streams over them."""

    def __init__(self, server: SqsServer) -> None:
        self.server = server
        self.opened: list[Opened] = []

    def settings(self, **settings: Any) -> dict[str, Any]:
        return {
            "region": "eu-central-1",
            "endpoint_url": self.server.url,
            "visibility_seconds": 2,
            "wait_seconds": 1,
            **settings,
        }

    def open(self, queue: str, **settings: Any) -> Opened:
        stream = Opened(sqs_stream(queue, **self.settings(**settings)))
        self.opened.append(stream)
        return stream

    async def wait_for_count(self, queue: str, count: int) -> None:
        async with asyncio.timeout(60):
            while await self.server.count(queue) != count:
                await asyncio.sleep(0.02)


@pytest.fixture
async def queues(sqs_server: SqsServer) -> AsyncIterator[Queues]:
    made = Queues(sqs_server)
    yield made
    for stream in made.opened:
        await stream.close()


async def test_a_message_comes_whole(queues):
    queue = await queues.server.make_queue()
    message_id = await queues.server.send(
        queue,
        "tide \u2028 \U0001f30a",
        text={"DataType": "String", "StringValue": "x"},
        number={"DataType": "Number", "StringValue": "7"},
        raw={"DataType": "Binary", "BinaryValue": b"\x00\xff"},
    )
    ((message, held),) = await queues.open(queue).take(1)
    assert (message.queue, message.message_id, message.body) == (queue, message_id, "tide \u2028 \U0001f30a")
    assert message.attributes == {"text": "x", "number": "7", "raw": b"\x00\xff"}
    assert (message.group_id, message.receive_count) == (None, 1)
    assert message.sent_ms > 1_700_000_000_000
    assert held.message is message


async def test_messages_of_a_plain_queue_do_not_wait_for_each_other_and_are_deleted_in_batches(queues):
    queue = await queues.server.make_queue()
    for n in range(23):
        await queues.server.send(queue, str(n))
    stream = queues.open(queue)
    items = await stream.take(23)
    assert len({stream.producer.get_advance_lane(held) for _, held in items}) == 23
    await stream.producer.advance([AdvanceItem(held, CLEAN) for _, held in items[1:]])
    await queues.wait_for_count(queue, 1)
    await stream.advance(items[0])
    await queues.wait_for_count(queue, 0)


async def test_a_message_that_failed_comes_again_after_its_time_and_is_counted_by_sqs(queues):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "bad")
    stream = queues.open(queue)
    (first,) = await stream.take(1)
    failed_at = asyncio.get_running_loop().time()
    await stream.advance(first, outcome=FAILED)
    (again,) = await stream.take(1)
    assert asyncio.get_running_loop().time() - failed_at > 1.0
    assert (again[0].message_id, again[0].receive_count) == (first[0].message_id, 2)
    assert again[1].receipt != first[1].receipt
    await stream.advance(again)
    await queues.wait_for_count(queue, 0)


async def test_a_message_that_failed_too_often_is_moved_by_the_queue_itself(queues):
    dead = await queues.server.make_queue()
    arn = (
        await queues.server.client.get_queue_attributes(
            QueueUrl=await queues.server.address(dead), AttributeNames=["QueueArn"]
        )
    )["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "1"})
    queue = await queues.server.make_queue(RedrivePolicy=policy)
    await queues.server.send(queue, "bad")
    stream = queues.open(queue)
    await stream.advance(*await stream.take(1), outcome=FAILED)
    await queues.wait_for_count(dead, 1)
    assert stream.untaken == 0


async def test_an_unread_event_is_redelivered(queues):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "1")
    stream = queues.open(queue)
    await stream.advance(*await stream.take(1), outcome=UNSEEN)
    await stream.advance(*await stream.take(1))
    await queues.wait_for_count(queue, 0)


async def test_a_pending_message_stays_invisible_far_beyond_its_time(queues):
    queue = await queues.server.make_queue()
    for n in range(12):
        await queues.server.send(queue, str(n))
    stream = queues.open(queue)
    items = await stream.take(12)
    other = queues.open(queue)
    with pytest.raises(TimeoutError):
        await other.take(1, seconds=4.0)  # what is shown is that this time passes without harm
    await stream.advance(*items)
    await queues.wait_for_count(queue, 0)
    assert stream.untaken == 0


async def test_a_rejected_message_is_moved_whole_and_deleted_only_then(queues):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "bad", why={"DataType": "String.code", "StringValue": "x"})
    rejected = await queues.server.make_queue()
    stream = queues.open(queue, reject_queue=rejected)
    (bad,) = await stream.take(1)
    url = await queues.server.address(rejected)
    await queues.server.client.delete_queue(QueueUrl=url)
    await stream.advance(bad, outcome=REJECTED)
    await until(lambda: stream.producer.describe_wait() is not None)
    assert "moving a rejected message" in stream.producer.describe_wait()
    assert await queues.server.count(queue) == 1
    await queues.server.client.create_queue(QueueName=rejected)
    await queues.wait_for_count(queue, 0)
    (moved,) = await queues.server.read(rejected)
    assert moved["Body"] == "bad"
    assert moved["MessageAttributes"]["why"]["StringValue"] == "x"
    assert stream.producer.describe_wait() is None


async def test_without_a_queue_for_it_a_rejected_message_comes_again(queues):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "bad")
    stream = queues.open(queue)
    await stream.advance(*await stream.take(1), outcome=REJECTED)
    ((message, _),) = await stream.take(1)
    assert message.receive_count == 2


async def test_a_reject_that_outweighs_a_success_does_not_delete_but_move(queues):
    queue, rejected = await queues.server.make_queue(), await queues.server.make_queue()
    await queues.server.send(queue, "bad")
    stream = queues.open(queue, reject_queue=rejected)
    await stream.advance(*await stream.take(1), outcome=AdvanceOutcome(2, 0, 1))
    await queues.wait_for_count(queue, 0)
    assert await queues.server.count(rejected) == 1


async def test_messages_received_but_never_published_are_released_at_the_end(queues):
    queue = await queues.server.make_queue()
    for n in range(3):
        await queues.server.send(queue, str(n))
    producer = sqs_stream(queue, **queues.settings(visibility_seconds=600))
    source = producer.open_stream()
    await asyncio.wait_for(source.__anext__(), 30)
    await source.aclose()  # type: ignore[attr-defined]
    await producer.aclose()
    assert len(await queues.open(queue).take(2, seconds=10)) == 2


async def test_an_outage_is_waited_out_at_the_start_and_in_the_middle(queues, monkeypatch):
    queue = await queues.server.make_queue()
    stream = queues.open(queue, endpoint_url=f"http://127.0.0.1:{free_port()}")
    await until(lambda: stream.producer.describe_wait() is not None)
    assert "connecting: SQS: get_queue_url" in stream.producer.describe_wait()
    await stream.close()

    await queues.server.send(queue, "1")
    later = queues.open(queue)
    (item,) = await later.take(1)
    real, failures = later.producer._queue._client.delete_message_batch, 2

    async def delete(**request: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionResetError("reset")
        return await real(**request)

    monkeypatch.setattr(later.producer._queue._client, "delete_message_batch", delete)
    await later.advance(item)
    await queues.wait_for_count(queue, 0)
    assert failures < 0


async def test_of_a_batch_only_what_was_not_deleted_is_tried_again(queues, monkeypatch, capfd):
    queue = await queues.server.make_queue()
    for n in range(3):
        await queues.server.send(queue, str(n))
    stream = queues.open(queue)
    items = await stream.take(3)
    real, asked = stream.producer._queue.delete, []
    numbers = [held.number for _, held in items]

    async def delete(held: Any) -> PartialFailure:
        asked.append([one.number for one in held])
        if len(asked) > 1:
            return await real(held)
        await real(held[:1])
        return PartialFailure(refused=frozenset(numbers[1:2]), failed=frozenset(numbers[2:]))

    monkeypatch.setattr(stream.producer._queue, "delete", delete)
    await stream.producer.advance([AdvanceItem(held, CLEAN) for _, held in items])
    await queues.wait_for_count(queue, 1)
    assert asked == [numbers, numbers[2:]]
    (again,) = await stream.take(1)  # what could not be deleted for good comes again
    assert again[0].message_id == items[1][0].message_id
    assert "messages were redelivered before they could be deleted" in "".join(capfd.readouterr())


async def test_of_a_batch_only_what_was_not_extended_is_tried_again(queues, monkeypatch):
    queue = await queues.server.make_queue()
    for n in range(3):
        await queues.server.send(queue, str(n))
    stream = queues.open(queue)
    items = await stream.take(3)
    real, asked = stream.producer._queue.extend, []
    numbers = [held.number for _, held in items]

    async def extend(held: Any, seconds: int) -> PartialFailure:
        asked.append([one.number for one in held])
        if len(asked) == 1:
            raise SqsCallError("reset")
        if len(asked) == 2:
            await real(held[:1], seconds)
            return PartialFailure(refused=frozenset(numbers[1:2]), failed=frozenset(numbers[2:]))
        return await real(held, seconds)

    monkeypatch.setattr(stream.producer._queue, "extend", extend)
    (again,) = await stream.take(1)
    assert again[0].message_id == items[1][0].message_id, "its receipt was not valid any more, and the others' were"
    assert asked[:3] == [numbers, numbers, numbers[2:]]
    await stream.advance(items[0], items[2], again)
    await queues.wait_for_count(queue, 0)


async def test_a_message_that_cannot_be_kept_invisible_is_released_and_logged(queues, monkeypatch, capfd):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "1")
    stream = queues.open(queue)
    (first,) = await stream.take(1)

    async def extend(held: Any, seconds: int) -> PartialFailure:
        raise SqsCallError("reset")

    monkeypatch.setattr(stream.producer._queue, "extend", extend)
    (again,) = await stream.take(1)
    assert again[0].message_id == first[0].message_id
    await until(lambda: "the visibility timeout of messages has expired" in "".join(capfd.readouterr()))
    await stream.advance(first, again)
    await queues.wait_for_count(queue, 0)


async def test_an_end_does_not_wait_for_ever_for_a_queue_that_takes_no_rejects(queues, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.2)
    queue, rejected = await queues.server.make_queue(), await queues.server.make_queue()
    await queues.server.send(queue, "bad")
    stream = queues.open(queue, reject_queue=rejected)
    (bad,) = await stream.take(1)
    await queues.server.client.delete_queue(QueueUrl=await queues.server.address(rejected))
    await stream.advance(bad, outcome=REJECTED)
    await asyncio.wait_for(stream.close(), 30)
    assert await queues.server.count(queue) == 1


async def test_a_queue_that_does_not_exist_is_named(queues):
    for settings in ({}, {"reject_queue": "nor-this"}):
        queue = await queues.server.make_queue() if settings else "no-such-queue"
        with pytest.raises(ConfigError, match=r"get_queue_url on 'no.*create the queue, or configure another one"):
            await queues.open(queue, **settings).take(1)


async def test_a_queue_that_is_deleted_meanwhile_ends_the_stream(queues):
    queue = await queues.server.make_queue()
    stream = queues.open(queue)
    await queues.server.send(queue, "1")
    await stream.take(1)
    await queues.server.client.delete_queue(QueueUrl=await queues.server.address(queue))
    with pytest.raises(RemoteError, match=rf"on '{queue}' failed.*the stream ends"):
        while True:  # on a busy machine, the message may have come again just before
            await stream.take(1)


async def test_a_stream_whose_deletions_are_refused_says_so_at_the_next_advance(queues, monkeypatch):
    queue = await queues.server.make_queue()
    for n in range(2):
        await queues.server.send(queue, str(n))
    stream = queues.open(queue)
    first, second = await stream.take(2)

    async def delete(held: Any) -> Any:
        raise SqsCallError("access denied", passing=False)

    monkeypatch.setattr(stream.producer._queue, "delete", delete)
    await stream.advance(first)
    await until(lambda: stream.producer._error)
    with pytest.raises(RemoteError, match="access denied"):
        await stream.advance(second)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"queue": ""}, "queue is empty"),
        ({"queue": "q", "reject_queue": "q"}, "reject_queue is the queue itself"),
        ({"queue": "q", "visibility_seconds": 1}, "visibility_seconds must be between 2 and 43200"),
        ({"queue": "q", "endpoint_url": "http://me:hunter2@h"}, "endpoint_url contains a user or a password"),
        ({"queue": "q", "wait_seconds": 21}, "wait_seconds must be between 0 and 20"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        SqsSettings(**settings)
    with pytest.raises(ValueError, match=said):
        SqsTrigger(**settings)


async def test_no_credential_appears_in_what_is_logged_or_raised(queues, monkeypatch, capfd):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    address = f"http://127.0.0.1:{free_port()}/?token=hunter3"
    stream = queues.open("a-queue", endpoint_url=address)
    await until(lambda: stream.producer.describe_wait() is not None)
    out, err = capfd.readouterr()
    assert "127.0.0.1" in stream.producer.describe_wait()
    assert "hunter" not in f"{stream.producer.describe_wait()} {out} {err}"


# -- the trigger -------------------------------------------------------------------------------------------------


async def test_triggers_of_one_queue_share_its_poll_and_select_for_themselves(queues):
    queue, rejected = await queues.server.make_queue(), await queues.server.make_queue()
    settings = queues.settings(reject_queue=rejected)
    triggers = [
        SqsTrigger(queue, where={"kind": "order"}, value_format="json", **settings),
        SqsTrigger(queue, where={"total": {"ge": 10}}, on_invalid="reject", **settings),
    ]
    bodies = ['{"kind": "order", "total": 5}', '{"kind": "refund", "total": 50}', '{"kind": "order", "total": 50}', "{"]
    ids = [await queues.server.send(queue, body) for body in bodies]
    manager = SharedStreamManager()
    fired: list[list[Any]] = [[], []]

    async def collect(number: int) -> None:
        async for event in route(manager, number, triggers[number]).events:
            fired[number].append(event)

    tasks = [asyncio.ensure_future(collect(number)) for number in (0, 1)]
    try:
        await queues.wait_for_count(rejected, 1)
        await queues.wait_for_count(queue, 0)
        assert len(manager.report()) == 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await manager.stop_all()
    assert [event.payload["value"] for event in fired[0]] == [
        {"kind": "order", "total": 5},
        {"kind": "order", "total": 50},
    ]
    assert [event.payload["value"] for event in fired[1]] == bodies[1:3]
    assert [event.identity.partition("#")[0] for event in fired[0]] == [ids[0], ids[2]]
    assert {event.identity for event in fired[0]}.isdisjoint(event.identity for event in fired[1])


async def test_nothing_is_deleted_before_what_was_fired_is_stored(queues):
    queue = await queues.server.make_queue()
    await queues.server.send(queue, "1")
    manager = SharedStreamManager()
    routed = route(manager, 1, SqsTrigger(queue, **queues.settings()))
    event = await asyncio.wait_for(routed.events.__anext__(), 30)
    seq = manager.bind_pending_event(trigger_id=1, key=routed.key)
    later = asyncio.ensure_future(routed.events.__anext__())
    await asyncio.sleep(3.0)  # what is shown is that more than its visibility timeout passes without a redelivery
    assert await queues.server.count(queue) == 1
    manager.confirm_persisted([seq])
    await queues.wait_for_count(queue, 0)
    assert not later.done()
    assert event.payload["value"] == "1"
    later.cancel()
    await asyncio.wait([later])
    await manager.stop_all()


async def test_a_trigger_that_holds_a_message_for_too_long_fails_and_the_message_comes_again(queues):
    queue = await queues.server.make_queue()
    message_id = await queues.server.send(queue, "1")
    manager = SharedStreamManager(ack_timeout=0.3)
    slow, other = (route(manager, number, SqsTrigger(queue, **queues.settings())) for number in (1, 2))
    for routed in (slow, other):
        assert (await asyncio.wait_for(routed.events.__anext__(), 30)).identity == message_id
    again = asyncio.ensure_future(other.events.__anext__())
    await failed(manager, 1)
    with pytest.raises(AckTimeout):
        await slow.events.__anext__()
    await manager.unsubscribe(1, slow.key)
    assert (await asyncio.wait_for(again, 30)).identity == message_id
    last = asyncio.ensure_future(other.events.__anext__())
    await queues.wait_for_count(queue, 0)
    last.cancel()
    await asyncio.wait([last])
    await manager.stop_all()


async def failed(manager: SharedStreamManager, trigger_id: int) -> None:
    """Wait until a subscriber was forced to fail."""
    await until(lambda: any(trigger_id in report.failed for report in manager.report()))


async def test_a_trigger_that_runs_by_itself_deletes_what_it_has_moved_past(queues):
    queue = await queues.server.make_queue()
    for n in range(2):
        await queues.server.send(queue, str(n))
    events = SqsTrigger(queue, **queues.settings()).run()
    first = await asyncio.wait_for(events.__anext__(), 30)
    second = await asyncio.wait_for(events.__anext__(), 30)
    assert {first.payload["value"], second.payload["value"]} == {"0", "1"}
    await queues.wait_for_count(queue, 1)
    await events.aclose()  # type: ignore[attr-defined]
