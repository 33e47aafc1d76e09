"""A test suite for sinks: tidemill's own sinks pass it, and yours can inherit it.

Write one test class per sink that inherits `SinkContract`, or `JsonSinkContract` if the target stores the JSON bytes
unchanged, and implement how to create the sink and how to read the received data. The tests are asynchronous and need
pytest-asyncio. Tests that need an optional method (a payload that the target refuses, an outage) are skipped if the
method is not overridden.

Example:
    >>> class TestMySink(SinkContract):
    ...     def make(self):
    ...         return MySink("out", {"path": self.path})  # and so on
"""

from __future__ import annotations

import abc
import asyncio
import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
import pydantic
import pytest

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.config.sink_types import SINK_TYPES
from tidemill.core.errors import RemoteError
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.sinks.base import Encoded, Refusal, Sink, encode_checked
from tidemill.sinks.payloads import CollectResult
from tidemill.testing.scripted import ScriptedDeadLetters

#: How long a target may take to recover after an outage.
RECOVERY_SECONDS = 20.0
#: How long a cancelled call may take to end.
CANCEL_SECONDS = 5.0
#: Values that some protocols cannot carry: half a surrogate pair, NUL, 10 MB of text, NaN, extreme dates.
NASTY: Sequence[Any] = (
    "\ud800",
    "a\0b",
    "x" * 10_000_000,
    math.nan,
    datetime.datetime.max.replace(tzinfo=datetime.UTC),
    datetime.datetime.min,
    datetime.date.max,
)


class Order(pydantic.BaseModel):
    """A model as users write them."""

    n: int
    note: str = ""


class Outage(Protocol):
    """The connection between a sink and its target, which can be interrupted; the methods must not block."""

    def down(self) -> None:
        """Refuse new connections, and close existing ones."""

    def hang(self) -> None:
        """Keep connections open, but transfer nothing."""

    def up(self) -> None:
        """Restore the connection."""


async def deliver(sink: Sink, payloads: Sequence[Any]) -> Sequence[Refusal | None]:
    """Encode and send payloads as one batch."""
    return await sink.send([sink.encode(payload) for payload in payloads])


async def deliver_at_last(sink: Sink, payloads: Sequence[Any], seconds: float = RECOVERY_SECONDS) -> None:
    """Send payloads again until all are confirmed; fail if the sink reports a permanent error."""
    left = [sink.encode(payload) for payload in payloads]
    deadline = time.monotonic() + seconds
    while left:
        try:
            answers = await sink.send(left)
        except RemoteError as error:
            assert error.retryable, error  # noqa: PT017 - either way is right
            answers = [Refusal(str(error), True)] * len(left)
        assert all(answer is None or answer.retryable for answer in answers), answers
        left = [item for item, answer in zip(left, answers, strict=True) if answer is not None]
        assert time.monotonic() < deadline, answers
        await asyncio.sleep(0.05 if left else 0)


async def deliver_through_outbox(sink: Sink, payloads: Sequence[Any], **delivery: Any) -> list[str]:
    """Deliver payloads as a pipeline does, and return the errors of those that were dead-lettered.

    Args:
        sink: The sink; this function connects and closes it.
        payloads: The payloads to deliver.
        delivery: Settings of the `delivery` section.
    """
    letters = ScriptedDeadLetters()
    backoff = {"initial_seconds": 0.01, "max_seconds": 0.1}
    settings = DeliverySettings.model_validate({"retry_backoff": backoff, **delivery})
    outbox = Outbox({sink.type: {sink.name: sink}}, letters, None, settings)
    await outbox.connect()
    try:
        field = SINK_TYPES[sink.type].field if sink.type in SINK_TYPES else "custom"
        settled = asyncio.Event()
        outbox.submit(outbox.route(CollectResult(**{field: payloads})), Origin([]), settled.set)
        async with asyncio.timeout(RECOVERY_SECONDS):
            await settled.wait()
    finally:
        await outbox.close()
    return [letter.error for letter in letters.letters for _ in letter.original_payloads]


@pytest.mark.asyncio
class SinkContract(abc.ABC):
    """The contract of a sink; inherit it, and implement how to create the sink and read its target.

    Attributes:
        secret: A password in the settings of every sink created here; no error message may contain it.
        in_one_order: Whether the sink keeps the order of all payloads, regardless of their keys.
    """

    secret: ClassVar[str] = ""
    in_one_order: ClassVar[bool] = False

    @abc.abstractmethod
    def make(self) -> Sink:
        """Return a sink that is not connected yet; all sinks of one test must have the same target."""

    @abc.abstractmethod
    def make_unusable(self) -> Sink:
        """Return a sink whose target cannot be used."""

    @abc.abstractmethod
    def payload(self, data: Any, key: str = "k") -> Any:
        """Return a payload; the sink must keep the order of payloads with the same key."""

    @abc.abstractmethod
    def bad_payload(self) -> Any:
        """Return a payload that `encode` rejects."""

    @abc.abstractmethod
    async def received(self, count: int) -> Sequence[bytes | Mapping[str, Any]]:
        """Wait until `count` payloads have arrived, and return them in order, as JSON or as data."""

    def refused_payload(self) -> Any | None:
        """Return a payload that `encode` accepts but the target refuses permanently; None if there is none."""
        return None

    def nasty_payloads(self) -> Sequence[Any]:
        """Return payloads with values, in their fields or data, that the protocol may be unable to carry."""
        plain = self.payload({"n": 1})
        fields = [name for name in getattr(plain, "__struct_fields__", ()) if name not in ("sink", "type")]
        payloads = [msgspec.structs.replace(plain, **{name: value}) for name in fields for value in NASTY]
        forms: list[Any] = [form for value in NASTY for form in ({"n": value}, {"n": [value]}, [value])]
        forms += [{name: 1} for name in NASTY if isinstance(name, str)]
        return payloads + [msgspec.structs.replace(plain, data=form) for form in forms if "data" in fields]

    def outage(self) -> Outage | None:
        """Return the connection between the sinks of this test and their target; None if it cannot be interrupted."""
        return None

    async def _read_data(self, count: int) -> list[Any]:
        return [json.loads(each) if isinstance(each, bytes) else dict(each) for each in await self.received(count)]

    def _check_no_secret(self, text: str) -> None:
        assert not self.secret or self.secret not in text

    async def test_what_is_confirmed_has_arrived_in_order(self) -> None:
        """Deliver one batch, then another."""
        sink = self.make()
        await sink.connect()
        assert list(await deliver(sink, [self.payload({"n": n}) for n in range(100)])) == [None] * 100
        assert list(await deliver(sink, [self.payload({"n": 100}), self.payload({"n": 101})])) == [None] * 2
        assert await self._read_data(102) == [{"n": n} for n in range(102)]
        await sink.close()

    async def test_models_dicts_and_json_in_bytes_are_taken(self) -> None:
        """Data may be a model, a dict, or JSON in bytes."""
        sink = self.make()
        await sink.connect()
        forms = [Order(n=1, note="\u00e9"), {"n": 2, "note": "x\ny"}, b'{"n":3,"note":"z"}']
        assert list(await deliver(sink, [self.payload(form) for form in forms])) == [None] * 3
        assert await self._read_data(3) == [{"n": 1, "note": "\u00e9"}, {"n": 2, "note": "x\ny"}, {"n": 3, "note": "z"}]
        await sink.close()

    async def test_what_was_encoded_is_sent_whatever_becomes_of_the_data(self) -> None:
        """A handler may reuse its dict after `encode`."""
        sink, data = self.make(), {"n": 1}
        await sink.connect()
        item = sink.encode(self.payload(data))
        data["n"] = 2
        assert list(await sink.send([item])) == [None]
        assert await self._read_data(1) == [{"n": 1}]
        await sink.close()

    async def test_data_that_cannot_be_encoded_is_that_payloads_own_failure(self) -> None:
        """`encode` raises, and the sink keeps working."""
        sink = self.make()
        await sink.connect()
        with pytest.raises(TypeError, match="object"):
            sink.encode(self.payload({"n": object()}))
        with pytest.raises((TypeError, ValueError)):
            sink.encode(self.bad_payload())
        assert list(await deliver(sink, [self.payload({"n": 1})])) == [None]
        await sink.close()

    async def test_sizes_and_keys_say_what_a_batch_needs_to_know(self) -> None:
        """The size limits a batch in bytes, and the key decides which payloads wait for a retry."""
        sink = self.make()
        small, large = (sink.encode(self.payload({"n": 1, "note": note})) for note in ("x", "x" * 10_000))
        assert isinstance(small, Encoded)
        other = sink.encode(self.payload({"n": 1, "note": "x"}, key="other"))
        assert small.key == large.key
        if small.key is not None:
            assert hash(small.key) == hash(large.key)
            assert (other.key == small.key) is self.in_one_order
        assert 0 < small.size_bytes < 10_000 <= large.size_bytes

    async def test_a_target_that_cannot_be_used_is_refused_at_connect_by_name(self) -> None:
        """The error names the sink, but does not contain the password."""
        sink = self.make_unusable()
        with pytest.raises(Exception, match=sink.section.replace(".", r"\.")) as caught:
            await sink.connect()
        self._check_no_secret(str(caught.value))
        await sink.close()

    async def test_closing_is_possible_before_connecting_and_twice(self) -> None:
        """`close` works at every stage of startup."""
        await self.make().close()
        sink = self.make()
        await sink.connect()
        await sink.close()
        await sink.close()

    async def test_a_payload_that_the_target_refuses_takes_no_other_down(self) -> None:
        """The refusal is at the index of that payload, and permanent."""
        refused = self.refused_payload()
        if refused is None:
            pytest.skip("this target refuses nothing that the sink lets through")
        sink = self.make()
        await sink.connect()
        payloads = [self.payload({"n": n}, key=f"k{n}") for n in range(20)]
        payloads.insert(7, refused)
        answers = await deliver(sink, payloads)
        assert [index for index, answer in enumerate(answers) if answer is not None] == [7]
        assert answers[7] is not None
        assert not answers[7].retryable
        assert answers[7].error
        self._check_no_secret(answers[7].error)
        assert await self._read_data(20) == [{"n": n} for n in range(20)]
        await sink.close()

    async def test_nasty_values_are_refused_before_they_are_sent_or_take_no_other_down(self) -> None:
        """A value is either rejected by `encode`, or sent without an exception in `send`."""
        sink = self.make()
        await sink.connect()
        for number, nasty in enumerate(self.nasty_payloads()):
            try:
                item = encode_checked(sink, nasty)
            except Exception:  # noqa: S112 - whatever it is, only this payload is refused
                continue
            good = [sink.encode(self.payload({"n": n}, key=f"good{n}")) for n in (2 * number, 2 * number + 1)]
            before, answer, after = await sink.send([good[0], item, good[1]])
            assert before is None, f"{item.body!r:.200}: {before}"
            assert after is None or (self.in_one_order and answer is not None), f"{item.body!r:.200}: {after}"
        await sink.close()

    @pytest.mark.parametrize("error", [ValueError("wrong data"), RuntimeError("wrong, or down")])
    async def test_a_payload_at_which_sending_raises_takes_no_other_down(self, error: Exception) -> None:
        """The other payloads of the batch arrive, and only this one is dead-lettered."""
        sink = self.make()
        sent, encode = sink.send, sink.encode
        payloads = [self.payload({"n": n}) for n in range(20)]
        culprits: list[Encoded] = []

        def encode_and_note(payload: Any) -> Encoded:
            item = encode(payload)
            culprits.extend([item] if payload is payloads[7] else [])
            return item

        async def send(batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
            if any(item is culprits[0] for item in batch):
                raise error
            return await sent(batch)

        sink.encode, sink.send = encode_and_note, send  # type: ignore[method-assign]
        (text,) = await deliver_through_outbox(sink, payloads)
        assert str(error) in text
        assert sorted(each["n"] for each in await self._read_data(19)) == [n for n in range(20) if n != 7]

    async def test_while_the_target_is_down_nothing_is_lost_and_it_arrives_once_it_is_back(self) -> None:
        """The sink reports a retryable error, and recovers without another `connect`."""
        outage = self.outage()
        if outage is None:
            pytest.skip("this target is never down")
        sink = self.make()
        await sink.connect()
        assert list(await deliver(sink, [self.payload({"n": 0})])) == [None]
        outage.down()
        payloads = [self.payload({"n": n}) for n in (1, 2)]
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                answers = await deliver(sink, payloads)
        except RemoteError as error:
            assert error.retryable  # noqa: PT017
            self._check_no_secret(str(error))
        else:
            assert all(answer is not None and answer.retryable for answer in answers)
        outage.up()
        await deliver_at_last(sink, payloads)
        assert await self._read_data(3) == [{"n": n} for n in range(3)]
        await sink.close()

    async def test_a_call_that_hangs_can_be_cancelled_and_the_sink_goes_on(self) -> None:
        """The delivery cancels a call that takes too long."""
        outage = self.outage()
        if outage is None:
            pytest.skip("this target never hangs")
        sink = self.make()
        await sink.connect()
        assert list(await deliver(sink, [self.payload({"n": 0})])) == [None]
        outage.hang()
        call = asyncio.ensure_future(deliver(sink, [self.payload({"n": 1})]))
        _, pending = await asyncio.wait({call}, timeout=0.2)
        assert pending, "the call did not wait for its confirmation"
        call.cancel()
        _, pending = await asyncio.wait({call}, timeout=CANCEL_SECONDS)
        assert not pending, "the call does not end"
        outage.up()
        await deliver_at_last(sink, [self.payload({"n": 2})])
        # The cancelled payload may or may not have arrived, even after the other one.
        assert {0, 2} <= {each["n"] for each in await self._read_data(2)} <= {0, 1, 2}
        async with asyncio.timeout(CANCEL_SECONDS * 2):
            await sink.close()


class JsonSinkContract(SinkContract):
    """The contract for targets that store bytes unchanged: models, containers and text as JSON, bytes as they are."""

    async def test_models_containers_text_and_bytes_have_their_form(self) -> None:
        """The target receives exactly the expected bytes."""
        sink = self.make()
        await sink.connect()
        forms = [Order(n=1), {"o": Order(n=2, note="x\ny")}, {"l": [1, None]}, "text \u00e9", b"raw \xff"]
        assert list(await deliver(sink, [self.payload(form) for form in forms])) == [None] * 5
        assert list(await self.received(5)) == [
            b'{"n":1,"note":""}',
            b'{"o":{"n":2,"note":"x\\ny"}}',
            b'{"l":[1,null]}',
            '"text \u00e9"'.encode(),
            b"raw \xff",
        ]
        await sink.close()
