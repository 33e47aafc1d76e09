"""Calls a handler's `transform` for messages of one partition, and delivers what it returns.

Invariant: the whole result is checked and routed before any of it is delivered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from tidemill.core.errors import HandlerError
from tidemill.core.pipeline.arrangement import WindowComplete
from tidemill.core.wording import format_count
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import RoutedPayload
from tidemill.pipeline.handler.models import SkipMessage
from tidemill.pipeline.hooks import begin_hook, call_hook, check_returned
from tidemill.pipeline.key_order import ReservedTurn
from tidemill.pipeline.windows.batches import may_start_as_batch, release_batch, resolve_batch
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.runtime.kafka.source_message import SourceMessage, span_messages
from tidemill.sinks.payloads import CollectResult
from tidemill.sinks.sending.delivery_batch import BatchPart, DeliveryBatch

_WANTED = "transform must return a list with one item per message, or a CollectResult"
_ITEM = "a payload, a list of payloads, or None"


@dataclass(frozen=True, slots=True)
class Transformed:
    """The payloads of a window.

    Attributes:
        each: The payloads of each message.
        whole: The payloads of all messages together.
    """

    each: Sequence[Sequence[RoutedPayload]] = ()
    whole: Sequence[RoutedPayload] = ()


class RefusedResultError(HandlerError):
    """The result of `transform` cannot be delivered.

    Args:
        error: The reason.
        returned: The result.
    """

    def __init__(self, error: Exception, returned: Any) -> None:
        super().__init__(str(error))
        self.error = error
        self.returned = returned


async def call_transform(context: EngineContext, messages: Sequence[SourceMessage]) -> Transformed:
    """Return the payloads for messages; none for a single message that the handler skips.

    Raises:
        RefusedResultError: The result cannot be delivered.
        Exception: The handler raised it.
    """
    try:
        # A copy, because the handler may modify its list.
        hook = begin_hook(context.handler.transform, list(messages))
        returned: Any = await call_hook(hook, context.hooks.calls, "transform", span_messages, messages)
    except SkipMessage:
        if len(messages) > 1:
            raise
        context.counters.skipped += 1
        return Transformed()
    try:
        return check_returned(_route, context, returned, len(messages))
    except Exception as error:
        raise RefusedResultError(error, returned) from error


def start_transformed(window: WindowInFlight, result: Transformed, reserved: ReservedTurn | None) -> None:
    """Start a window without tasks: deliver the result of `transform`.

    Args:
        window: The window.
        result: The payloads.
        reserved: The placeholder of the window's only message in the order of its key, if any.
    """
    everything = range(len(window.messages))
    window.hold_window()
    order = window.partition.order
    if order is not None and reserved is not None:
        order.ended(reserved)
    if _is_plain(window, result):
        _start_run(window, result)
        return
    for index, routed in enumerate(result.each):
        if routed:
            window.times.count_payloads(window.messages[index].offset, len(routed))
            window.deliver(routed, (index,), None, "transform")
    if result.whole:
        for message in window.messages:
            window.times.count_payloads(message.offset, len(result.whole))
        window.deliver(result.whole, everything, None, "transform")
    if order is None or reserved is not None or not window.context.overridden.on_message_complete:
        window.apply(window.graph.set_tasks(()))
    else:
        window.graph.set_tasks([(index, (index,)) for index in everything])
        opened = list(zip(window.messages, window.entries, strict=True))
        order.take_hooks(opened, lambda index: window.apply(window.graph.note_task_done(index)))


def _is_plain(window: WindowInFlight, result: Transformed) -> bool:
    """Return whether the window can be delivered and resolved in bulk."""
    return not result.whole and may_start_as_batch(window)


def _start_run(window: WindowInFlight, result: Transformed) -> None:
    """Deliver a window in bulk."""
    batch = DeliveryBatch("transform", functools.partial(release_batch, window))
    # Empty if an empty result was returned for the whole window.
    parts = [
        BatchPart(batch, index, message, len(routed))
        for index, (message, routed) in enumerate(zip(window.messages, result.each, strict=False))
        if routed
    ]
    if parts:
        window.graph.hold([part.index for part in parts])
        if window.context.finished is not None:
            _note_payloads(window, parts)
        window.context.outbox.submit_run(parts, [routed for routed in result.each if routed])
        window.partition.submitted(sum([part.size_bytes for part in parts]), len(parts))
    window.partition.tasks_done(len(window.messages))
    resolve_batch(window, window.graph.complete_all())
    window.apply((WindowComplete(),))


def _note_payloads(window: WindowInFlight, parts: Sequence[BatchPart]) -> None:
    """Record for reports how many payloads each message has."""
    counts = [part.pending for part in parts]
    if counts.count(counts[0]) == len(window.messages):
        window.times.payloads_each = counts[0]
    else:
        window.times.payloads = {part.message.offset: part.pending for part in parts}


def _route(context: EngineContext, returned: Any, count: int) -> Transformed:
    if isinstance(returned, CollectResult):
        return Transformed(whole=context.route(returned))
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise TypeError(f"{_WANTED}, not {_describe(returned)}")
    # Iterate, because a sequence class of the user may report a wrong length.
    items = returned if type(returned) is list else [*returned]
    if len(items) != count:
        raise ValueError(
            f"{_WANTED}; it got {format_count(count, 'message')} and returned {format_count(len(items), 'item')}"
        )
    route_one = context.outbox.route_one
    return Transformed(
        [
            ()
            if item is None
            else (route_one(item),)
            if isinstance(item, msgspec.Struct) and not isinstance(item, CollectResult)
            else [route_one(payload) for payload in _list_payloads(index, item)]
            for index, item in enumerate(items)
        ]
    )


def _list_payloads(index: int, item: Any) -> Sequence[Any]:
    if not isinstance(item, Sequence) or isinstance(item, (str, bytes)):
        raise TypeError(f"{_WANTED}; item {index} must be {_ITEM}, not {_describe(item)}")
    return item


def _describe(wrong: Any) -> str:
    text = f"{type(wrong).__name__} ({repr(wrong)[:200]})"
    if inspect.isawaitable(wrong):
        return f"{text}; is an `await` missing?"
    return f"{text}; make it a list" if isinstance(wrong, (Iterator, Set)) else text


def list_refused(error: Exception) -> CollectResult | Sequence[Any] | None:
    """Return the payloads of a refused result for a single message, for its dead letter."""
    if not isinstance(error, RefusedResultError):
        return None
    try:
        return check_returned(_find_payloads, error.returned)
    except Exception:  # the payloads may be the reason for the refusal
        return None


def _find_payloads(returned: Any) -> CollectResult | Sequence[Any] | None:
    if isinstance(returned, CollectResult) or not isinstance(returned, Sequence):
        return returned if isinstance(returned, CollectResult) else None
    found: list[Any] = []
    for item in returned:
        found += item if isinstance(item, (list, tuple)) else (item,)
    return [payload for payload in found if isinstance(payload, msgspec.Struct)]
