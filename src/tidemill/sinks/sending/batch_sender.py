"""The shell around one sink: sends the batches that `core.delivery.send_queue` chooses, and reports answers and
outcomes.

The sender decides nothing. There is one asyncio task per sink. A batch is sent as soon as the sink is idle; payloads
submitted meanwhile make up the next batch. An idle sink therefore sends at once, a busy one in large batches.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import structlog

from tidemill.core.delivery.breaker import BreakerState
from tidemill.core.delivery.culprit import SendFault, find_fault
from tidemill.core.delivery.send_items import AskDecision, Decision, Item, ItemsDelivered, SendLimits
from tidemill.core.delivery.send_queue import SendQueue
from tidemill.core.errors import InvariantError, RemoteError, describe_error, escape_surrogates
from tidemill.runtime.link.progress import SinkStats
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.log.user_code import explain_error
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Encoded, Refusal, Sink, check_encoded, encode_checked
from tidemill.sinks.sending.delivery_batch import BatchPart, settle_all
from tidemill.sinks.sending.sender import Sender
from tidemill.sinks.sending.submission import DeliveryLane, Entry, Failure, Question, QueuedPayload, Submission

log = structlog.get_logger(__name__)

_BREAKER_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
#: A batch that the sink has not answered after this time is reported as stalled.
SLOW_SECONDS = 5.0
#: How long a sink may take to close.
CLOSE_SECONDS = 15.0
#: How long a cancelled call may take to end before the sender stops waiting for it.
CANCEL_SECONDS = 5.0
#: Types of keys that are known to be hashable.
_HASHABLE = frozenset((bytes, str, int, type(None)))


class BatchSender:
    """One sink, its queue and its task.

    Args:
        sink: The sink.
        limits: How to retry; batch sizes and linger are the sink's own.
        timeout_seconds: How long the sink may take for a batch, unless the sink sets its own limit.
        ask: Called with each question that needs a decision; the answer comes through `decided`.
        gave_up: Called with payloads that are not retried.
        settled: Called after payloads were settled.
    """

    def __init__(
        self,
        sink: Sink,
        limits: SendLimits,
        timeout_seconds: float,
        ask: Callable[[Sender, Question], None],
        gave_up: Callable[[Sender, Failure], None],
        settled: Callable[[], None],
    ) -> None:
        self.sink = sink
        self.stats = SinkStats()
        self._queue: SendQueue[DeliveryLane, QueuedPayload] = SendQueue(
            replace(
                limits,
                max_count=sink.max_batch_count,
                max_bytes=sink.max_batch_bytes,
                linger_seconds=sink.linger_seconds,
            )
        )
        self._timeout_seconds = sink.send_timeout_seconds or timeout_seconds
        self._ask = ask
        self._gave_up = gave_up
        self._settled = settled
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[NoReturn] | None = None
        self._sent_at: float | None = None
        self._breaker = BreakerState.CLOSED
        # Cancelled calls that do not end. They are referenced, or they would be garbage-collected while they run.
        self._left: set[asyncio.Task[Any]] = set()

    @property
    def label(self) -> str:
        """The section that configures the sink."""
        return self.sink.section

    @property
    def outstanding(self) -> int:
        """The number of payloads that are neither confirmed nor given up."""
        return self._queue.outstanding

    @property
    def failing(self) -> str | None:
        """The reason why payloads are being retried; None if no payload is."""
        failing = self._queue.failing
        return failing[1] if failing is not None else None

    async def connect(self) -> None:
        await self.sink.connect()

    def start(self, tasks: EngineTasks) -> None:
        """Start sending, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        self._task = tasks.keep(f"the deliveries to {self.label}", self._run())

    def add(self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart) -> None:
        """Queue a payload; one that cannot be encoded becomes a question, in a later turn of the loop."""
        now = self._loop.time()
        try:
            ready = encode_checked(self.sink, payload)
        except BaseException as error:  # a user's data can raise any exception
            self._refuse(payload, lane, submission, error)
            return
        submission.origin.size_bytes += ready.size_bytes
        item = Item(lane, ready.key, ready.size_bytes, QueuedPayload(payload, ready, submission))
        self._queue.add((item,), now)
        self._added(now)

    def add_all(self, payloads: Sequence[tuple[Any, BatchPart]], lane: DeliveryLane) -> None:
        """Queue payloads of a delivery batch, in order; see `add`."""
        now, encode = self._loop.time(), self.sink.encode
        items: list[Entry] = []
        for payload, part in payloads:
            try:
                ready: Any = encode(payload)
                if type(ready) is not Encoded or type(ready.key) not in _HASHABLE or type(ready.size_bytes) is not int:
                    check_encoded(self.sink, ready)
            except BaseException as error:  # a user's data can raise any exception
                self._queue.add(items, now)
                items = []
                self._refuse(payload, lane, part, error)
                continue
            part.size_bytes += ready.size_bytes
            items.append(Item(lane, ready.key, ready.size_bytes, QueuedPayload(payload, ready, part)))
        self._queue.add(items, now)
        self._added(now)

    def _refuse(
        self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart, error: BaseException
    ) -> None:
        """Ask what to do with a payload that cannot be encoded."""
        text = explain_error(error, "encode")
        item = Item(lane, None, 0, QueuedPayload(payload, None, submission))
        question = self._queue.refuse(item, text, self._loop.time())
        self._note_error(text, 1)
        self._loop.call_soon(self._ask, self, question)

    def _added(self, now: float) -> None:
        if self._breaker is not BreakerState.CLOSED and (shed := self._queue.shed(now)):
            self._loop.call_soon(self._apply, shed)
        self._wake_up()

    def _wake_up(self) -> None:
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    def decided(self, question: Question, decision: Decision) -> None:
        """Pass a decision to the queue."""
        effects = self._queue.note_decision(question, decision, self._loop.time(), random.getrandbits(32))
        self._apply(effects)
        self._wake_up()

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition."""
        self._queue.abandon(lane)
        self._wake_up()

    async def _run(self) -> NoReturn:
        queue = self._queue
        while True:
            batch = queue.take(self._loop.time())
            if batch:
                await self._send(batch)
            else:
                await self._wait(queue.due)

    async def _wait(self, due: float | None) -> None:
        self._wake = self._loop.create_future()
        timer = self._loop.call_at(due, self._wake_up) if due is not None else None
        try:
            await self._wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    async def _send(self, batch: Sequence[Entry]) -> None:
        self._sent_at = self._loop.time()
        if self.stats.error_count:
            self.stats.retried += sum(item.attempts > 0 for item in batch)
        bits = random.getrandbits(32)
        try:
            answers = await self._collect_answers([item.value.encoded for item in batch])  # type: ignore[misc]
        except Exception as error:
            text = str(error) if isinstance(error, RemoteError) else explain_error(error, "send")
            retryable = error.retryable if isinstance(error, RemoteError) else True
            fault = find_fault(error)
            if fault is SendFault.TARGET:
                self._note_error(text, 0, "a sink cannot be written to; all of its payloads wait")
            elif fault.may_be_a_payload and len(batch) > 1:
                self._note_error(text, 0, "a sink raised an error over a batch, which is now sent in parts")
            else:
                self._note_error(text, len(batch))
            effects = self._queue.note_failure(text, retryable, self._loop.time(), bits, fault)
        else:
            if answers.count(None) != len(answers):
                refused = [answer for answer in answers if answer is not None]
                # None are left only if a sink answers that all of them wait; then they count as refused.
                refused = [answer for answer in refused if not answer.waits] or refused
                self._note_error(_choose_error(refused), len(refused))
            effects = self._queue.note_answers(answers, self._loop.time(), bits)
        finally:
            self.stats.sends.add(self._loop.time() - self._sent_at)
            self._sent_at = None
        self._apply(effects)

    async def _collect_answers(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        call = self._loop.create_task(self.sink.send(batch))
        try:
            await asyncio.wait((call,), timeout=self._timeout_seconds)
            if not call.done():
                await self._cancel(call)
                raise RemoteError(f"{self.label}: no answer within {self._timeout_seconds:g} s")
        except asyncio.CancelledError:
            call.cancel()  # the sender is closed
            raise
        if call.cancelled():
            raise RemoteError(f"{self.label}: the sink cancelled its own send")
        return check_answers(call.result(), batch, self.label)

    async def _cancel(self, call: asyncio.Task[Any]) -> None:
        """Cancel a call, and stop waiting if it does not end: a sink that hangs must not hold its payloads forever."""
        call.cancel()
        await asyncio.wait((call,), timeout=CANCEL_SECONDS)
        if call.done():
            _ = call.cancelled() or call.exception()  # retrieved, or asyncio would log it
            return
        log.error("a cancelled call to a sink does not end", sink=self.label)
        self._left.add(call)
        call.add_done_callback(self._left.discard)

    def _note_error(self, text: str, count: int, event: str = "a sink refused payloads") -> None:
        stats = self.stats
        stats.error_count += 1
        stats.refused += count
        stats.last_error = escape_surrogates(text)[:2000]
        stats.last_error_at = time.time()
        throttle(log, 10.0).warning(event, sink=self.label, payloads=count, error=text[:2000])

    def _apply(self, effects: Sequence[ItemsDelivered[DeliveryLane, QueuedPayload] | Question | Failure]) -> None:
        for effect in effects:
            if isinstance(effect, ItemsDelivered):
                self.stats.delivered_count += 1
                self.stats.delivered_payloads += len(effect.items)
                self.stats.last_delivered_at = time.time()
                settle_all([item.value.submission for item in effect.items])
            elif isinstance(effect, AskDecision):
                self._ask(self, effect)
            else:
                self._gave_up(self, effect)
        self._watch_breaker()
        self._settled()

    def _watch_breaker(self) -> None:
        """Log when the breaker opens and when it closes, not every probe in between."""
        state = self._queue.find_breaker_state(self._loop.time())
        if (state is BreakerState.CLOSED) is not (self._breaker is BreakerState.CLOSED):
            self.stats.breaker_opened = self._queue.opened
            if state is BreakerState.CLOSED:
                log.info("a sink works again; its circuit breaker is closed", sink=self.label)
            else:
                log.error(
                    "a sink keeps failing; its circuit breaker is open", sink=self.label, error=self._find_reason()
                )
        self._breaker = state
        self.stats.breaker_state = _BREAKER_STATES[state]

    def _find_reason(self) -> str | None:
        return self.failing[:2000] if self.failing is not None else self.stats.last_error

    def list_waiting(self) -> Iterable[Submission | BatchPart]:
        """Return the submissions with payloads that are neither confirmed nor given up."""
        submissions = (item.value.submission for item in self._queue.list_items() if not item.gone)
        return dict.fromkeys(submissions)

    def describe_wait(self) -> str | None:
        """Return what waits, and why; None if nothing does."""
        if self._task is None:
            return None
        queue, now = self._queue, self._loop.time()
        if queue.failing is not None:
            since, error = queue.failing
            broken = "" if queue.find_breaker_state(now) is BreakerState.CLOSED else " (circuit breaker open)"
            return f"{queue.outstanding} payloads wait for {now - since:.0f} s{broken}: {error}"
        if self._sent_at is not None and now - self._sent_at > SLOW_SECONDS:
            return f"{queue.outstanding} payloads wait: no answer for {now - self._sent_at:.0f} s"
        if queue.asked:
            return f"{queue.asked} payloads wait for on_delivery_error"
        return None

    async def close(self) -> None:
        """Stop sending and close the sink; errors are logged."""
        if self._task is not None:
            await self._tasks.stop(self._task)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.sink.close()
        except Exception as error:
            log.warning("a sink could not be closed", sink=self.label, error=describe_error(error))


def check_answers(answers: Any, batch: Sequence[Encoded], label: str) -> Sequence[Refusal | None]:
    """Check a sink's answers about a batch, and return them.

    Raises:
        InvariantError: There is not one answer per payload.
    """
    if not isinstance(answers, Sequence) or len(answers) != len(batch):
        count = len(answers) if isinstance(answers, Sequence) else repr(answers)[:200]
        raise InvariantError(f"{label} gave {count} answers for {len(batch)} payloads")
    if answers.count(None) != len(answers):
        for answer in answers:
            if answer is not None and not isinstance(answer, Refusal):
                raise InvariantError(f"{label} answered {answer!r:.200}, which is neither None nor a Refusal")
    return answers


def _choose_error(refused: Sequence[Refusal]) -> str:
    """Return the error of a payload that will never be accepted, if there is one."""
    return next((refusal.error for refusal in refused if not refusal.retryable), refused[0].error)
