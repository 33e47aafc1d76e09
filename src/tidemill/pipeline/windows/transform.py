"""Calls a handler's `transform` for messages of one partition, and delivers what it returns.

Invariant: what it returned is checked and routed as a whole before anything of it is delivered.
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
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import Routed
from tidemill.pipeline.handler.models import SkipMessage
from tidemill.pipeline.hooks import begin_hook, call_hook, check_returned
from tidemill.pipeline.key_order import KeptPlace
from tidemill.pipeline.windows.runs import may_start_as_run, release_run, resolve_run
from tidemill.pipeline.windows.window import WindowRun
from tidemill.runtime.messages import SourceMessage, place_of
from tidemill.sinks.payloads import CollectResult
from tidemill.sinks.sending.run import RunPart, SubmissionRun

_WANTED = "transform must return a list with one place per message, or a CollectResult"
_PLACE = "a payload, a list of payloads, or None"


@dataclass(frozen=True, slots=True)
class Transformed:
    """What is to be delivered for a window.

    Attributes:
        each: For each of its messages.
        whole: For all of them together.
    """

    each: Sequence[Sequence[Routed]] = ()
    whole: Sequence[Routed] = ()


class RefusedResultError(HandlerError):
    """What `transform` returned cannot be delivered.

    Args:
        error: Why.
        returned: What it returned.
    """

    def __init__(self, error: Exception, returned: Any) -> None:
        """Keep what was returned."""
        super().__init__(str(error))
        self.error = error
        self.returned = returned


async def call_transform(context: EngineContext, messages: Sequence[SourceMessage]) -> Transformed:
    """Return what a handler wants delivered for messages; nothing for a single one that it skips.

    Raises:
        RefusedResultError: It cannot be delivered.
        Exception: What the handler raised.
    """
    try:
        # A copy: what the handler does to its list must not change ours.
        hook = begin_hook(context.handler.transform, list(messages))
        returned: Any = await call_hook(hook, context.hooks.calls, "transform", place_of, messages)
    except SkipMessage:
        if len(messages) > 1:
            raise
        context.counters.skipped += 1
        return Transformed()
    try:
        return check_returned(_route, context, returned, len(messages))
    except Exception as error:
        raise RefusedResultError(error, returned) from error


def start_transformed(window: WindowRun, result: Transformed, place: KeptPlace | None) -> None:
    """Start a window without tasks: deliver what `transform` returned.

    Args:
        window: The window.
        result: What is to be delivered.
        place: What kept the window's place in the order of its key, if anything did.
    """
    everything = range(len(window.messages))
    window.hold_window()
    order = window.partition.order
    if order is not None and place is not None:
        order.ended(place)
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
    if order is None or place is not None or not window.context.overridden.on_message_complete:
        window.apply(window.graph.set_tasks(()))
    else:
        window.graph.set_tasks([(index, (index,)) for index in everything])
        opened = list(zip(window.messages, window.entries, strict=True))
        order.take_hooks(opened, lambda index: window.apply(window.graph.note_task_done(index)))


def _is_plain(window: WindowRun, result: Transformed) -> bool:
    """Return whether nothing is to happen to a single message, as far as can be known."""
    return not result.whole and may_start_as_run(window)


def _start_run(window: WindowRun, result: Transformed) -> None:
    """Deliver a window as a run."""
    run = SubmissionRun("transform", functools.partial(release_run, window))
    # There are none where an empty result for the whole window was returned.
    parts = [
        RunPart(run, index, message, len(routed))
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
    resolve_run(window, window.graph.complete_all())
    window.apply((WindowComplete(),))


def _note_payloads(window: WindowRun, parts: Sequence[RunPart]) -> None:
    """Note for reports how many payloads there are of each message."""
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
    # What a class of the user's own yields counts, whatever it says about its length.
    places = returned if type(returned) is list else [*returned]
    if len(places) != count:
        raise ValueError(f"{_WANTED}: it was given {count} and returned {len(places)}; None: nothing to deliver")
    route_one = context.outbox.route_one
    return Transformed(
        [
            ()
            if place is None
            else (route_one(place),)
            if isinstance(place, msgspec.Struct) and not isinstance(place, CollectResult)
            else [route_one(payload) for payload in _list_payloads(index, place)]
            for index, place in enumerate(places)
        ]
    )


def _list_payloads(index: int, place: Any) -> Sequence[Any]:
    if not isinstance(place, Sequence) or isinstance(place, (str, bytes)):
        raise TypeError(f"{_WANTED}; place {index} must be {_PLACE}, not {_describe(place)}")
    return place


def _describe(wrong: Any) -> str:
    text = f"{type(wrong).__name__} ({repr(wrong)[:200]})"
    if inspect.isawaitable(wrong):
        return f"{text}; is an `await` missing?"
    return f"{text}; make it a list" if isinstance(wrong, (Iterator, Set)) else text


def list_refused(error: Exception) -> CollectResult | Sequence[Any] | None:
    """Return the payloads of a result for a single message that cannot be delivered, for its letter."""
    if not isinstance(error, RefusedResultError):
        return None
    try:
        return check_returned(_find_payloads, error.returned)
    except Exception:  # that may be the very reason for this letter
        return None


def _find_payloads(returned: Any) -> CollectResult | Sequence[Any] | None:
    if isinstance(returned, CollectResult) or not isinstance(returned, Sequence):
        return returned if isinstance(returned, CollectResult) else None
    found: list[Any] = []
    for place in returned:
        found += place if isinstance(place, (list, tuple)) else (place,)
    return [payload for payload in found if isinstance(payload, msgspec.Struct)]
