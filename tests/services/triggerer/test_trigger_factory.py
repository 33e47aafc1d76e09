from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tidemill.services.triggerer.lists.file import encode_kwargs
from tidemill.services.triggerer.lists.trigger_factory import TriggerFactory
from tidemill.store.records import TriggerSpec
from tidemill.triggers.base import BaseTrigger, TriggerEvent


class Typed(BaseTrigger):
    """Serializes what it was created with, and when it has seen something, that too."""

    def __init__(self, value: Any, seen: Any = None) -> None:
        super().__init__()
        self.value = value
        self.seen = seen

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Typed", {"value": self.value, **({} if self.seen is None else {"seen": self.seen})}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(self.value)


def spec_of(**kwargs: Any) -> TriggerSpec:
    return TriggerSpec("t", f"{__name__}.Typed", encode_kwargs(kwargs), "always")


def test_a_trigger_that_serializes_as_listed_is_not_kept() -> None:
    factory = TriggerFactory(spec_of(value={"b": [1, "ü"], "a": None}), None)
    assert factory.remember(factory.create()) is None


@pytest.mark.parametrize("seen", [(1, 2), {3: datetime(2026, 1, 1, tzinfo=UTC)}, {1, 2}, b"\0"])
def test_what_a_trigger_serializes_is_what_it_is_created_with_again(seen: Any) -> None:
    factory = TriggerFactory(spec_of(value=1), None)
    kept = factory.remember(Typed(1, seen))
    assert kept is not None
    for again in (factory.create(), TriggerFactory(spec_of(value=1), tuple(json.loads(kept))).create()):
        assert isinstance(again, Typed)
        assert again.seen == seen
        assert type(again.seen) is type(seen)


def test_what_an_earlier_version_kept_is_readable() -> None:
    kept = (f"{__name__}.Typed", '{"seen": [1, 2], "value": 1}')
    again = TriggerFactory(spec_of(value=1), kept).create()
    assert isinstance(again, Typed)
    assert again.seen == [1, 2]


def test_what_cannot_be_written_down_is_not_kept() -> None:
    factory = TriggerFactory(spec_of(value=1), None)
    assert factory.remember(Typed(1, object())) is None
    assert factory.remember(Typed(float("nan"))) is None
    assert factory.create().serialize()[1] == {"value": 1}
