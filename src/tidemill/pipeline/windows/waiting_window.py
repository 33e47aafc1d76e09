"""A window that waits for `arrange` or `transform` to return; it may be split or refused.

Only a single message is refused, that is, dead-lettered or held. Invariant: a message that the handler cannot process,
or that cannot be parsed, is found by splitting its window, and holds back no other message.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from tidemill.core.errors import describe_error
from tidemill.core.ledger import LedgerEntry
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.brake import Case
from tidemill.pipeline.checks import check_tasks
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.handler.models import PendingContext
from tidemill.pipeline.hooks import LOG_SECONDS, begin_hook, call_hook, check_returned
from tidemill.pipeline.key_order import ReservedTurn
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.reports.report import WindowTimes
from tidemill.pipeline.windows.failures import write_or_hold
from tidemill.pipeline.windows.known_results import start_tasks
from tidemill.pipeline.windows.transform import RefusedResultError, call_transform, list_refused, start_transformed
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.runtime.kafka.record_headers import check_headers
from tidemill.runtime.kafka.source_message import SourceMessage, set_field, span_messages
from tidemill.runtime.log.setup import kind_of, throttle
from tidemill.runtime.log.user_code import explain_error
from tidemill.sources.base import TopicPartition

#: The hook whose failure a letter of each kind reports.
_HOOKS = {
    LetterKind.ARRANGE: "arrange",
    LetterKind.TRANSFORM: "transform",
    LetterKind.PARSE: "deserialize_message",
}


class WaitingWindow:
    """A window of messages of one partition that waits for the handler.

    Args:
        context: The engine's parts.
        partition: Its partition.
        messages: Its messages, in order.
        entries: Their entries in the ledger.
        arrived: The loop's time when its first message arrived.
        arrange_again: Called with the window to queue it again for `arrange`, when its turn has come or for a retry.
        is_parsed: Whether its messages are parsed; if not, there is only one, which is parsed before `arrange`.
    """

    __slots__ = (
        "_arrange_again",
        "_arrived",
        "_causes",
        "_context",
        "_entries",
        "_is_parsed",
        "_partition",
        "_reserved",
        "messages",
    )

    def __init__(
        self,
        context: EngineContext,
        partition: OwnedPartition,
        messages: list[SourceMessage],
        entries: Sequence[LedgerEntry[TopicPartition, int]],
        arrived: float,
        arrange_again: Callable[[WaitingWindow], None],
        *,
        is_parsed: bool = True,
    ) -> None:
        self._context = context
        self._partition = partition
        self.messages = messages
        self._entries = entries
        self._arrived = arrived
        self._arrange_again = arrange_again
        self._is_parsed = is_parsed
        self._reserved: ReservedTurn | None = None
        self._causes: dict[int, str] | None = None

    async def arrange(self) -> Sequence[WaitingWindow]:
        """Pass the window to the handler and start the tasks that it returns; if the handler raises, split the window.

        Returns:
            The parts to arrange instead, in order, if the window cannot be arranged as a whole.
        """
        partition = self._partition
        if partition.closed or partition.leaving or (not self._is_parsed and not self._parse()):
            return ()
        if not self._context.overridden.transform:
            return await self._arrange()
        order = partition.order
        if order is not None and self._reserved is None and order.is_any_open(self.messages):
            if len(self.messages) > 1:
                return self._split()
            turn = functools.partial(self._arrange_again, self)
            self._reserved = order.reserve_turn((self.messages[0], self._entries[0]), turn)
            return ()
        return await self._transform()

    async def _transform(self) -> Sequence[WaitingWindow]:
        context, partition = self._context, self._partition
        started_at = time.time_ns() // 1000
        try:
            result = await call_transform(context, self.messages)
        except Exception as error:
            if partition.closed or partition.leaving:
                return ()
            if len(self.messages) > 1:
                return self._split()
            self._cannot_take(LetterKind.TRANSFORM, error)
        else:
            if not partition.closed and not partition.leaving:
                start_transformed(self._make_run(started_at), result, self._reserved)
        return ()

    def _make_run(self, started_at: int) -> WindowInFlight:
        context = self._context
        context.counters.windows += 1
        times = WindowTimes(context.counters.windows, started_at, time.time_ns() // 1000)
        return WindowInFlight(context, self._partition, self.messages, self._entries, self._arrived, times)

    async def _arrange(self) -> Sequence[WaitingWindow]:
        context, partition = self._context, self._partition
        started_at = time.time_ns() // 1000
        try:
            # A copy, because the handler may modify its list.
            pending = PendingContext(partition.list_pending_tasks)
            hook = begin_hook(context.handler.arrange, list(self.messages), pending)
            returned = await call_hook(hook, context.hooks.calls, "arrange", span_messages, self.messages)
            tasks = check_returned(check_tasks, "arrange", returned)
        except Exception as error:
            if partition.closed or partition.leaving:
                return ()
            if len(self.messages) > 1:
                return self._split()
            self._cannot_take(LetterKind.ARRANGE, error)
        else:
            if not partition.closed and not partition.leaving:
                start_tasks(self._make_run(started_at), tasks, self._reserved)
        return ()

    def _parse(self) -> bool:
        """Set the payload of the only message; return whether that succeeded."""
        message = self.messages[0]
        try:
            check_headers(message)
            set_field(message, "payload", self._context.handler.deserialize_message(message))
        except BaseException as error:  # any exception of the hook concerns this message alone
            self._refuse(LetterKind.PARSE, error)
            return False
        self._is_parsed = True
        return True

    def _split(self) -> Sequence[WaitingWindow]:
        half = len(self.messages) // 2
        return [
            WaitingWindow(
                self._context,
                self._partition,
                self.messages[part],
                self._entries[part],
                self._arrived,
                self._arrange_again,
            )
            for part in (slice(0, half), slice(half, None))
        ]

    def _cannot_take(self, kind: LetterKind, error: Exception) -> None:
        refused = list_refused(error)
        if isinstance(error, RefusedResultError):
            error = error.error
        throttle(self._context.log, LOG_SECONDS, about=kind_of(describe_error(error))).warning(
            f"{kind.value} raised", message=self._describe(), partition=self._partition.name, exc_info=error
        )
        self._refuse(kind, error, refused)

    def _describe(self) -> str:
        message = self.messages[0]
        try:
            return self._context.handler.message_label(message)
        except BaseException as error:
            position = f"{message.topic}/{message.partition}/{message.offset}"
            return f"{position} (message_label raised {describe_error(error)})"

    def _refuse(self, kind: LetterKind, error: BaseException, refused: object = None) -> None:
        """Dead-letter or hold the only message; it gets no task."""
        context, partition, text = self._context, self._partition, explain_error(error, _HOOKS[kind])
        message, entry, order = self.messages[0], self._entries[0], self._partition.order
        if self._causes is None:
            self._causes = {}
        causes = self._causes
        if context.brake is not None and order is not None and self._reserved is None:
            self._reserved = order.reserve_turn((message, entry))

        def write() -> None:
            partition.reject(message, entry, kind, text, refused)
            if context.brake is not None:
                context.brake.ended(partition, message.offset, causes.get(0), is_alone=True)
            if order is not None and self._reserved is not None:
                order.release_turn(self._reserved, entry)

        again, offsets = functools.partial(self._arrange_again, self), (message.offset,)
        case = Case(partition, offsets, offsets, causes, (0,), again, write)
        write_or_hold(context, f"{kind.value}: {type(error).__name__}", text, case)
