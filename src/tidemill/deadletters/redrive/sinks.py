"""Sends the payloads of dead letters to their sinks again, with the same sinks and senders as a pipeline.

Invariants: a letter counts as sent once its sink confirmed every payload. The cursor is saved afterwards, so a crash in
between sends one batch again. Payloads of one key keep the order of their letters. A payload that a sink refuses for
good, or that makes the sink raise, is refused alone (`core.delivery.culprit`). A sink that accepts nothing ends the
redrive, and no letter is blamed.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.config.settings import Settings
from tidemill.config.sink_types import SINK_TYPES, load_class
from tidemill.core.deadletters.redrive import UnsentReason
from tidemill.core.delivery.send_items import Decision, SendLimits
from tidemill.core.errors import InvariantError, RemoteError, describe_error
from tidemill.core.retry import Backoff
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.payloads import PayloadLostError, restore_fields
from tidemill.deadletters.redrive.cursor import RedriveCursor
from tidemill.deadletters.redrive.targets import NotSentError, Positions, RedriveItem, Unsent
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Sink, encode_checked
from tidemill.sinks.build import build_sinks
from tidemill.sinks.sending.batch_sender import BatchSender
from tidemill.sinks.sending.sender import Sender, connect_sender
from tidemill.sinks.sending.submission import Entry, Failure, Question, Submission

#: How long a sink may take to connect, or to answer a batch unless it sets its own limit.
ANSWER_SECONDS = 60.0
#: A sink that accepts nothing for this long ends the redrive, which can be continued later.
GIVE_UP_SECONDS = 120.0
_BACKOFF = Backoff(0.1, 5.0)


class _Origin(msgspec.Struct):
    """The letter that a submission's payloads belong to, and their size once they are submitted."""

    item: RedriveItem
    size_bytes: int = 0


class SinkTarget:
    """Sends payloads to the sinks that refused them.

    Args:
        settings: The pipeline's settings.
        cursor: Saves positions; None sends nothing.
        stopped: Returns whether the redrive is to stop; it then no longer waits for a sink that accepts nothing.
    """

    def __init__(
        self, settings: Settings, cursor: RedriveCursor | None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._cursor = cursor
        self._stopped = stopped
        self._answer_seconds = max(ANSWER_SECONDS, settings.delivery.timeout_seconds)
        self._senders = {
            kind: {name: self._make_sender(sink) for name, sink in named.items()}
            for kind, named in build_sinks(settings).items()
        }
        self._connected: list[BatchSender] = []
        self._tasks = EngineTasks(self._note_fault)
        self._runner = asyncio.Runner()
        self._changed = asyncio.Event()
        self._pending = 0
        self._refused: dict[int, tuple[RedriveItem, UnsentReason, str]] = {}
        self._failure: Exception | None = None

    def _make_sender(self, sink: Sink) -> BatchSender:
        # Payloads are retried until the redrive as a whole gives up, so every question concerns a refused payload.
        limits = SendLimits(budget_seconds=math.inf, backoff=_BACKOFF, breaker_failures=sys.maxsize)
        return BatchSender(sink, limits, self._answer_seconds, self._ask, self._refuse, self._wake_up)

    def _wake_up(self) -> None:
        self._changed.set()

    def open(self) -> None:
        """Fence an older process of the same redrive; a sink is connected when the first letter for it is prepared."""
        if self._cursor is not None:
            self._cursor.open()

    def prepare(self, letter: Letter, partition: int, offset: int) -> RedriveItem:
        """Restore the letter's payloads; see `RedriveTarget.prepare`."""
        sender = self._senders.get(letter.sink_type, {}).get(letter.sink_name)
        if sender is None:
            label = f"sinks.{letter.sink_type}.{letter.sink_name}"
            raise NotSentError(UnsentReason.NOT_CONFIGURED, f"{label} is not configured")
        label = sender.label
        if sender not in self._connected and self._cursor is not None:
            self._runner.run(self._connect(sender))
        try:
            content = [restore_payload(letter, text) for text in letter.original_payloads]
            size = sum(encode_checked(sender.sink, payload).size_bytes for payload in content)
        except PayloadLostError as error:
            raise NotSentError(UnsentReason.LOST, f"a payload for {label}: {error}") from None
        except Exception as error:  # a sink may raise any exception for a payload that it cannot encode
            raise NotSentError(UnsentReason.REFUSED, f"{label}: {describe_error(error)}") from None
        return RedriveItem(letter, partition, offset, content, len(content), size, label)

    async def _connect(self, sender: BatchSender) -> None:
        await connect_sender(sender, ANSWER_SECONDS)
        sender.start(self._tasks)
        self._connected.append(sender)

    def send(self, items: Sequence[RedriveItem], positions: Positions) -> Unsent:
        """Deliver, then save the cursor; see `RedriveTarget.send`."""
        assert self._cursor is not None
        unsent = self._runner.run(self._deliver(items))
        self._cursor.commit((), positions)
        return unsent

    async def _deliver(self, items: Sequence[RedriveItem]) -> Unsent:
        """Send every payload until it is confirmed or refused for good; return the refused letters."""
        self._refused = {}
        self._pending = len(items)
        for item in items:
            submission = Submission(_Origin(item), item.count, self._release)
            for payload in item.content:
                self._senders[item.letter.sink_type][item.letter.sink_name].add(payload, None, submission)
        progress = {sender.label: (sender.outstanding, time.monotonic()) for sender in self._connected}
        try:
            while self._pending:
                await self._changed.wait()
                self._changed.clear()
                self._check(progress)
        finally:
            for sender in self._connected:
                sender.abandon(None)
        return [self._refused[id(item)] for item in items if id(item) in self._refused]

    def _check(self, progress: dict[str, tuple[int, float]]) -> None:
        """Raise the error that ends the redrive, if there is one.

        Args:
            progress: By the sender's label, how many payloads were outstanding, and since when.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        now = time.monotonic()
        for sender in self._connected:
            outstanding, since = progress[sender.label]
            if sender.outstanding < outstanding:
                progress[sender.label] = (sender.outstanding, since := now)
            if sender.outstanding and sender.failing is not None and (self._stopped() or now - since > GIVE_UP_SECONDS):
                raise RemoteError(
                    f"{sender.label} is not accepting payloads: {sender.failing}; run the same command again to "
                    "continue"
                )

    def _release(self) -> None:
        self._pending -= 1
        self._changed.set()

    def _ask(self, sender: Sender, question: Question) -> None:
        if question.sink_failed:
            # No letter is at fault, and retrying does not help.
            text = f"{sender.label}: {question.error}; run the same command again to continue"
            self._failure = RemoteError(text, retryable=False)
            self._changed.set()
            return
        items = [item for item in question.items if not item.gone]
        sender.decided(question, Decision.DROP)
        self._note_refused(sender, items, question.error)

    def _refuse(self, sender: Sender, failure: Failure) -> None:
        self._note_refused(sender, failure.items, failure.error)

    def _note_refused(self, sender: Sender, items: Sequence[Entry], error: str) -> None:
        for entry in items:
            item = entry.value.submission.origin.item
            self._refused.setdefault(id(item), (item, UnsentReason.REFUSED, f"{sender.label}: {error}"))
            entry.value.submission.settle()

    def _note_fault(self, text: str) -> None:
        self._failure = InvariantError(text)
        self._changed.set()

    def close(self) -> None:
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()

    async def _close(self) -> None:
        await asyncio.gather(*(sender.close() for sender in self._connected))
        self._tasks.close()


def restore_payload(letter: Letter, text: str) -> Any:
    """Return a payload of a letter as a hook would have returned it.

    Args:
        letter: The letter.
        text: One of its `original_payloads`.

    Raises:
        PayloadLostError: The payload cannot be restored.
    """
    kind = SINK_TYPES.get(letter.sink_type)
    if kind is None:
        # A sink of another package: the class of its payloads is unknown here, but their fields are known.
        return types.SimpleNamespace(**restore_fields(text, typed=True))
    fields = restore_fields(text, typed=not kind.sends_json)
    if kind.json_op and fields.get("op", kind.json_op) != kind.json_op:
        fields = restore_fields(text, typed=True)
    try:
        return load_class(kind.payload)(**fields)
    except (AttributeError, TypeError) as error:
        raise PayloadLostError(f"not a {kind.payload_name}: {error}") from None
