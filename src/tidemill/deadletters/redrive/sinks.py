"""Sends the payloads of dead letters to their sinks again, through the same sink classes and configuration.

Invariants: payloads of one key go in the order of their letters, one at a time; a letter counts as sent when its sink
confirmed every payload; the cursor is saved after that, so that a crash in between sends one batch again, at most.
A payload at which a sink raises is refused, and the others of its batch go on (`core.culprit`).
"""

from __future__ import annotations

import asyncio
import random
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.config.settings import Settings
from tidemill.config.sink_types import SINK_TYPES, load_class
from tidemill.core.deadletters.redrive import Why
from tidemill.core.delivery.culprit import Fault, Witnesses, fault_of, parts_of
from tidemill.core.errors import RemoteError, TidemillError, describe_error
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.opening import RedriveCursor
from tidemill.deadletters.payloads import PayloadLostError, restored_fields
from tidemill.deadletters.redrive.targets import Item, NotSentError, Positions, Unsent
from tidemill.sinks.base import Encoded, Refusal, Sink, encoded
from tidemill.sinks.build import build_sinks
from tidemill.sinks.sending.batch_sender import checked

#: A sink may take this long to connect, or to answer a batch; longer if it says so.
ANSWER_SECONDS = 60.0
#: A sink that takes nothing for so long ends the redrive, to be continued later.
PATIENCE_SECONDS = 120.0
#: After so many payloads in a row at which it raised, a sink is given a pause.
RAISED_IN_A_ROW = 5
_BACKOFF = Backoff(0.1, 5.0)


class _Parcel(msgspec.Struct):
    """A payload on its way."""

    item: Item
    encoded: Encoded
    # See `core.culprit.Suspect`; whatever went through in this run speaks for the sink.
    doubted_at: int | None = 0
    raised_alone: bool = False


class SinkTarget:
    """Payloads to the sinks that refused them.

    Args:
        settings: The pipeline's settings.
        cursor: Saves positions; None: nothing is sent.
        stopped: Tells that somebody wants to stop; a sink that does not answer is then not waited for.
    """

    def __init__(
        self, settings: Settings, cursor: RedriveCursor | None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Prepare; nothing is connected before `open`."""
        self._cursor = cursor
        self._stopped = stopped
        self._answer_seconds = max(ANSWER_SECONDS, settings.delivery.timeout_seconds)
        self._sinks = build_sinks(settings)
        self._connected: list[Sink] = []
        self._witnesses: dict[str, Witnesses] = {}
        self._runner = asyncio.Runner()

    def open(self) -> None:
        """Fence an older process of the same redrive; sinks are connected when the first letter for them comes."""
        if self._cursor is not None:
            self._cursor.open()

    def prepare(self, letter: Letter, partition: int, offset: int) -> Item:
        """Restore the letter's payloads; see `RedriveTarget.prepare`."""
        sink = self._sinks.get(letter.sink_type, {}).get(letter.sink_name)
        label = f"sinks.{letter.sink_type}.{letter.sink_name}" if sink is None else sink.place
        if sink is None:
            raise NotSentError(Why.NOT_CONFIGURED, f"{label} is not configured")
        if sink not in self._connected and self._cursor is not None:
            self._runner.run(self._connect(sink, label))
        try:
            content = [encoded(sink, payload_of(letter, text)) for text in letter.original_payloads]
        except PayloadLostError as error:
            raise NotSentError(Why.LOST, f"a payload for {label}: {error}") from None
        except Exception as error:  # what a sink says about a payload that it cannot encode
            raise NotSentError(Why.REFUSED, f"{label}: {describe_error(error)}") from None
        size = sum(each.size_bytes for each in content)
        return Item(letter, partition, offset, content, len(content), size, label)

    async def _connect(self, sink: Sink, label: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await sink.connect()
        except TidemillError:
            raise
        except TimeoutError:
            raise RemoteError(f"{label}: no connection within {ANSWER_SECONDS:g} s") from None
        except Exception as error:
            raise RemoteError(f"{label}: {describe_error(error)}") from error
        self._connected.append(sink)

    def send(self, items: Sequence[Item], positions: Positions) -> Unsent:
        """Deliver, sink by sink, then save the cursor; see `RedriveTarget.send`."""
        assert self._cursor is not None
        unsent = self._runner.run(self._delivered(items))
        self._cursor.commit((), positions)
        return unsent

    async def _delivered(self, items: Sequence[Item]) -> Unsent:
        by_sink: dict[str, list[_Parcel]] = {}
        for item in items:
            by_sink.setdefault(item.where, []).extend(_Parcel(item, each) for each in item.content)
        unsent: Unsent = []
        for label, parcels in by_sink.items():
            letter = parcels[0].item.letter
            sink = self._sinks[letter.sink_type][letter.sink_name]
            refused = await self._through(sink, label, parcels)
            # One line per letter, whatever number of its payloads was refused.
            first = {id(parcel.item): (parcel.item, Why.REFUSED, f"{label}: {text}") for parcel, text in refused[::-1]}
            unsent += list(first.values())[::-1]
        return unsent

    async def _through(self, sink: Sink, label: str, parcels: list[_Parcel]) -> list[tuple[_Parcel, str]]:
        """Send until every payload is confirmed or refused for good."""
        refused: list[tuple[_Parcel, str]] = []
        since, failures = time.monotonic(), 0
        while parcels:
            batch, rest = _batch(sink, parcels)
            answers, trouble = await self._answers(sink, label, batch)
            again = []
            for parcel, answer in zip(batch, answers, strict=True):
                if answer is not None and answer.retryable:
                    again.append(parcel)
                    trouble = answer.error
                elif answer is not None:
                    refused.append((parcel, answer.error))
            parcels = again + rest
            if len(again) < len(batch):
                since, failures = time.monotonic(), 0
            if again:
                failures += 1
                await self._pause(label, failures, since, trouble)
        return refused

    async def _answers(self, sink: Sink, label: str, batch: Sequence[_Parcel]) -> tuple[Sequence[Refusal | None], str]:
        """Return an answer per payload; where the sink raises, the batch is sent in parts to find the culprit."""
        witnesses = self._witnesses.setdefault(label, Witnesses())
        answers: list[Refusal | None] = []
        trouble, in_a_row, is_part = "", 0, False
        todo = deque([batch])
        while todo:
            part = todo.popleft()
            if in_a_row == RAISED_IN_A_ROW:
                witnesses.sink_failed()
                answers += [Refusal(trouble, retryable=True)] * len(part)
                continue
            try:
                found: Sequence[Refusal | None] = await self._answered(sink, label, [each.encoded for each in part])
            except Exception as error:  # a sink of another package may raise anything
                if isinstance(error, RemoteError) and not error.retryable:
                    raise RemoteError(f"{label}: {error}; the same command goes on where this one ended") from None
                fault = fault_of(error)
                if fault.may_be_a_payload and len(part) > 1:
                    todo.extendleft(reversed(parts_of(part, is_part=is_part)))
                    is_part = True
                    continue
                trouble = describe_error(error) if fault.may_be_a_payload else str(error)
                guilty = fault.may_be_a_payload and witnesses.guilty(part[0], fault)
                in_a_row += fault is Fault.UNKNOWN and not guilty
                found = [Refusal(trouble, retryable=not guilty)] * len(part)
            else:
                if None in found:
                    witnesses.went_through()
                    in_a_row = 0
            answers += found
        return answers, trouble

    async def _answered(self, sink: Sink, label: str, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        seconds = max(self._answer_seconds, sink.send_timeout_seconds or 0.0)
        try:
            async with asyncio.timeout(seconds) as limit:
                return checked(await sink.send(batch), batch, label)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RemoteError(f"no answer within {seconds:g} s") from error

    async def _pause(self, label: str, failures: int, since: float, trouble: str) -> None:
        if self._stopped() or time.monotonic() - since > PATIENCE_SECONDS:
            raise RemoteError(f"{label} takes nothing now: {trouble}; the same command goes on where this one ended")
        await asyncio.sleep(_BACKOFF.delay(failures, random.getrandbits(JITTER_BITS)))

    def close(self) -> None:
        """Close the sinks."""
        try:
            self._runner.run(_closed(self._connected))
        finally:
            self._runner.close()


async def _closed(sinks: Sequence[Sink]) -> None:
    await asyncio.gather(*(sink.close() for sink in sinks), return_exceptions=True)


def _batch(sink: Sink, parcels: Sequence[_Parcel]) -> tuple[list[_Parcel], list[_Parcel]]:
    """Split off what the sink gets next: never two of one key, or a refused one could be overtaken.

    A payload at which the sink raised goes alone, after those that it does not hold up.
    """
    batch: list[_Parcel] = []
    rest: list[_Parcel] = []
    keys = {parcel.encoded.key for parcel in parcels if parcel.raised_alone} - {None}
    size = 0
    for index, parcel in enumerate(parcels):
        key = parcel.encoded.key
        if parcel.raised_alone or key in keys:
            rest.append(parcel)
            continue
        size += parcel.encoded.size_bytes
        if batch and (len(batch) == sink.max_batch_count or size > sink.max_batch_bytes):
            return batch, rest + list(parcels[index:])
        batch.append(parcel)
        keys |= {key} - {None}
    return (batch, rest) if batch else (rest[:1], rest[1:])


def payload_of(letter: Letter, text: str) -> Any:
    """Return a payload of a letter as a hook would have returned it.

    Args:
        letter: The letter.
        text: One of its `original_payloads`.

    Raises:
        PayloadLostError: It cannot be had back.
    """
    kind = SINK_TYPES.get(letter.sink_type)
    if kind is None:
        # A sink of another package: the class of its payloads is not known here, but their fields are.
        return types.SimpleNamespace(**restored_fields(text, typed=True))
    fields = restored_fields(text, typed=not kind.sends_json)
    if kind.json_op and fields.get("op", kind.json_op) != kind.json_op:
        fields = restored_fields(text, typed=True)
    try:
        return load_class(kind.payload)(**fields)
    except (AttributeError, TypeError) as error:
        raise PayloadLostError(f"it is not a {kind.payload_name}: {error}") from None
