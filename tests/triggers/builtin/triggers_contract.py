"""What every trigger that ships has to do, for tests of each."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

from tidemill.triggers.base import BaseTrigger, TriggerEvent


def made_again(trigger: BaseTrigger) -> BaseTrigger:
    """Return the trigger that another host would make of it: by way of JSON, and the same when written down again."""
    classpath, kwargs = json.loads(json.dumps(trigger.serialize()))
    module, _, name = classpath.rpartition(".")
    again = getattr(importlib.import_module(module), name)(**kwargs)
    assert isinstance(again, BaseTrigger)
    assert again.serialize() == trigger.serialize()
    assert json.loads(json.dumps(again.serialize())) == [classpath, kwargs]
    return again


async def fired(trigger: BaseTrigger, seconds: float = 20.0) -> list[TriggerEvent]:
    """Run a trigger to its end, and return what it fired; everything has to be JSON."""
    async with asyncio.timeout(seconds):
        events = [event async for event in trigger.run()]
    for event in events:
        assert json.loads(json.dumps(event.payload)) == event.payload
    return events


async def first(trigger: BaseTrigger, count: int, seconds: float = 20.0) -> list[TriggerEvent]:
    """Run a trigger until it has fired so often."""
    source: Any = trigger.run()
    try:
        async with asyncio.timeout(seconds):
            return [await source.__anext__() for _ in range(count)]
    finally:
        await source.aclose()
