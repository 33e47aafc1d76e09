"""Names of Airflow's shared streams that code and tests written for those rely on, beside the public ones."""

from __future__ import annotations

import pytest
from tests.triggers.streams.scripted_streams import KEY, Clock, Log, Scene, pull, turns, until

from tidemill.triggers import shared_stream
from tidemill.triggers.shared_stream import AckTimeout, SharedStreamManager, reject_shared_stream_event

both = pytest.mark.parametrize("ack", [False, True], ids=["fast", "ack"])


async def test_a_clock_given_as_underscore_now_is_the_one_that_deadlines_follow() -> None:
    scene, clock = Scene(), Clock()
    manager = SharedStreamManager(log=scene.log, ack_timeout=0.1, now=scene.clock, _now=clock)
    stream = manager.subscribe(trigger_id=1, trigger=scene.trigger_class(), key=KEY)
    scene.put("e1")
    await pull(stream)
    manager.bind_pending_event(trigger_id=1, key=KEY)
    clock.now = 0.1
    with pytest.raises(AckTimeout):
        await pull(stream)
    await manager.stop_all()


@both
async def test_a_subscriber_that_is_too_slow_can_be_caught_under_the_private_name(ack: bool) -> None:
    scene = Scene(ack=ack, max_subscriber_queue=2)
    stream = scene.join(1)
    scene.put(*range(3))
    await turns()
    with pytest.raises(shared_stream._SubscriberOverflow, match="exceeded maxsize=2"):
        await pull(stream, 3)
    await scene.manager.stop_all()


@both
async def test_groups_are_a_mapping_of_the_keys_that_are_polled_at_this_moment(ack: bool) -> None:
    scene = Scene(ack=ack)
    groups = scene.manager._groups
    first = scene.join(1, "a")
    scene.join(1, "b")
    assert set(groups) == {"a", "b"}
    await scene.manager.unsubscribe(1, "b")
    assert "b" not in groups
    scene.put(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await pull(first)
    assert groups == {}
    scene.join(2, "a")
    assert list(groups) == ["a"]
    await scene.manager.stop_all()
    assert groups == {}
    assert scene.manager._groups is groups


async def test_a_group_that_lets_its_last_subscriber_go_by_itself_is_polled_on() -> None:
    scene = Scene()
    scene.join(1)
    scene.manager._groups[KEY].unsubscribe(1)
    scene.put("e1", "e2")
    await until(lambda: len(scene.producer.items) == 2)
    assert scene.producer.advanced == [("e1", (0, 0, 0)), ("e2", (0, 0, 0))]
    await scene.manager.stop_all()


def test_the_warning_about_a_reject_outside_of_an_event_begins_as_that_of_airflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log()
    monkeypatch.setattr(shared_stream, "log", log)
    reject_shared_stream_event()
    [text] = log.said("warning")
    assert text.startswith("reject_shared_stream_event called outside an ack-mode binding window; ignored")
