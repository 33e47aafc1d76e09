"""Connects a trigger to its events: from the shared stream of its key, or from its own `run`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Hashable
from dataclasses import dataclass
from typing import Any

import structlog

from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from tidemill.triggers.streams.manager import SharedStreamManager
from tidemill.triggers.streams.subscription import AckSubscription, FastSubscription

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventRoute:
    """The events of a trigger, and where they come from.

    Attributes:
        key: The key of the shared stream; None if the trigger runs by itself.
        events: The events of the trigger.
        subscription: The subscription to the shared stream, if there is one.
    """

    key: Hashable | None
    events: AsyncIterator[TriggerEvent]
    subscription: AckSubscription | FastSubscription | None = None


def route(manager: SharedStreamManager, trigger_id: Any, trigger: BaseTrigger) -> EventRoute:
    """Start a trigger: on the shared stream of its key, or by itself if it has no key.

    If `shared_stream_key` raises or returns an unhashable value, this logs a warning, and the trigger runs by itself.
    When the events have ended, for any reason, unsubscribe the trigger from its key.
    """
    key = None
    if isinstance(trigger, BaseEventTrigger):
        try:
            key = trigger.shared_stream_key()
            hash(key)
        except (Exception, SystemExit) as error:
            key = None
            log.warning(
                "shared_stream_key raised or returned an unhashable key; the trigger runs by itself",
                trigger_id=trigger_id,
                exc_info=error,
            )
        if key is not None:
            stream = manager.subscribe(trigger_id=trigger_id, trigger=trigger, key=key)
            events = _check_events(trigger, "filter_shared_stream(self, events)", trigger.filter_shared_stream(stream))
            return EventRoute(key, events, stream)
    return EventRoute(None, find_events(trigger))


def find_events(trigger: BaseTrigger) -> AsyncIterator[TriggerEvent]:
    """Return the events of a trigger that runs by itself.

    Raises:
        TypeError: `run` is not an async generator.
    """
    return _check_events(trigger, "run(self)", trigger.run())


def _check_events(trigger: BaseTrigger, method: str, events: Any) -> AsyncIterator[TriggerEvent]:
    if isinstance(events, AsyncIterable):
        return events  # type: ignore[return-value]
    if inspect.iscoroutine(events):
        events.close()  # otherwise Python warns that the coroutine was never awaited
    raise TypeError(
        f"{type(trigger).__name__}.{method.partition('(')[0]} must be an async generator, but returned a "
        f"{type(events).__name__}; write `async def {method}` with `yield TriggerEvent(...)` in it"
    )
