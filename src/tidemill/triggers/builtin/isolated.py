"""Runs a single event trigger on a stream of its own.

The stream works exactly like one that a host shares between triggers: an event counts as resolved when the next one is
requested.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import SharedStreamManager


async def run_alone(trigger: BaseEventTrigger) -> AsyncIterator[TriggerEvent]:
    """Yield the events of a trigger that has a stream key, without sharing its stream."""
    manager = SharedStreamManager()
    stream = manager.subscribe(trigger_id=trigger.trigger_id, trigger=trigger, key=trigger.shared_stream_key())
    events = trigger.filter_shared_stream(stream)
    try:
        async for event in events:
            yield event
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
        await manager.stop_all()
