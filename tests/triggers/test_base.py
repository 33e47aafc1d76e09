"""Triggers and their events."""

from __future__ import annotations

import pickle

import pytest
from tests.triggers.streams.scripted_streams import Trigger

from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent


def test_events_are_equal_by_payload() -> None:
    assert TriggerEvent({"a": 1}) == TriggerEvent({"a": 1}, identity="other")
    assert TriggerEvent(1) != TriggerEvent(2)
    assert TriggerEvent(1) != 1


def test_an_event_shows_its_payload_and_can_be_pickled() -> None:
    event = TriggerEvent({"a": 1}, "id")
    assert repr(event) == "TriggerEvent<{'a': 1}>"
    copy = pickle.loads(pickle.dumps(event))
    assert (copy.payload, copy.identity) == ({"a": 1}, "id")
    assert (TriggerEvent().payload, TriggerEvent().identity) == (None, None)


def test_an_event_carries_nothing_else() -> None:
    with pytest.raises(AttributeError):
        TriggerEvent(1).other = 2  # type: ignore[attr-defined]


def test_a_trigger_must_say_how_it_is_made_and_how_it_runs() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseTrigger()  # type: ignore[abstract]


async def test_a_trigger_has_what_its_host_sets_and_calls() -> None:
    trigger = Trigger(prefix="p")
    assert (trigger.task_instance, trigger.trigger_id) == (None, None)
    assert repr(trigger) == "<no.such.module.Trigger prefix=p>"
    trigger.trigger_id = "orders"
    assert trigger.log is not None
    assert (await trigger.cleanup(), await trigger.on_kill()) == (None, None)


def test_an_event_trigger_shares_nothing_unless_it_says_so() -> None:
    class Plain(BaseEventTrigger):
        serialize = Trigger.serialize
        run = Trigger.run

    trigger = Plain()
    assert (trigger.shared_stream_key(), trigger.upstream_claim()) == (None, None)
    with pytest.raises(NotImplementedError, match="filter_shared_stream"):
        trigger.filter_shared_stream(None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="create_shared_stream_producer"):
        Plain.create_shared_stream_producer({})
