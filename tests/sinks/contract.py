"""What every sink has to do, written once: a test class per sink inherits it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import pydantic
import pytest

from tidemill.sinks.base import Encoded, Refusal, Sink


class Order(pydantic.BaseModel):
    """A payload as users write them."""

    number: int
    note: str = ""


async def deliver(sink: Sink, payloads: Sequence[Any]) -> Sequence[Refusal | None]:
    """Encode and send payloads as one batch."""
    return await sink.send([sink.encode(payload) for payload in payloads])


class SinkContract(abc.ABC):
    """Inherit, and say how the sink is made and read."""

    @abc.abstractmethod
    def make(self) -> Sink:
        """Return a sink that is not connected yet, on a fresh target."""

    @abc.abstractmethod
    def make_unusable(self) -> Sink:
        """Return a sink whose target cannot be used."""

    @abc.abstractmethod
    def payload(self, data: Any, key: str = "k") -> Any:
        """Return a payload; those of one key are in order."""

    @abc.abstractmethod
    def bad_payload(self) -> Any:
        """Return a payload that this sink can never take."""

    @abc.abstractmethod
    async def received(self, count: int) -> list[bytes]:
        """Return what arrived, in order, once there are `count`."""

    async def test_what_is_confirmed_has_arrived_in_order(self) -> None:
        sink = self.make()
        await sink.connect()
        assert list(await deliver(sink, [self.payload({"n": n}) for n in range(100)])) == [None] * 100
        assert list(await deliver(sink, [self.payload({"n": 100})])) == [None]
        assert await self.received(101) == [b'{"n":%d}' % n for n in range(101)]
        await sink.close()

    async def test_models_containers_text_and_bytes_have_their_form(self) -> None:
        sink = self.make()
        await sink.connect()
        forms = [Order(number=1), {"o": Order(number=2, note="x\ny")}, [1, None], "text \u00e9", b"raw \xff"]
        assert list(await deliver(sink, [self.payload(form) for form in forms])) == [None] * 5
        assert await self.received(5) == [
            b'{"number":1,"note":""}',
            b'{"o":{"number":2,"note":"x\\ny"}}',
            b"[1,null]",
            '"text \u00e9"'.encode(),
            b"raw \xff",
        ]
        await sink.close()

    async def test_data_without_a_json_form_is_that_payloads_own_failure(self) -> None:
        sink = self.make()
        await sink.connect()
        with pytest.raises(TypeError, match="object"):
            sink.encode(self.payload({"x": object()}))
        with pytest.raises((TypeError, ValueError)):
            sink.encode(self.bad_payload())
        await sink.close()

    async def test_sizes_and_keys_say_what_a_batch_needs_to_know(self) -> None:
        sink = self.make()
        small, large = sink.encode(self.payload("x")), sink.encode(self.payload("x" * 10_000))
        assert isinstance(small, Encoded)
        assert small.key == large.key != sink.encode(self.payload("x", key="other")).key
        assert 0 < small.size_bytes < 10_000 <= large.size_bytes

    async def test_a_target_that_cannot_be_used_is_refused_at_connect_by_name(self) -> None:
        sink = self.make_unusable()
        with pytest.raises(Exception, match=rf"sinks\.{sink.type}\.{sink.name}"):
            await sink.connect()
        await sink.close()

    async def test_closing_is_possible_before_connecting_and_twice(self) -> None:
        await self.make().close()
        sink = self.make()
        await sink.connect()
        await sink.close()
        await sink.close()
