"""The names of payloads: the same for the same work, different for all else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tidemill.pipeline.delivery.idempotency import name_payloads
from tidemill.pipeline.delivery.routing import Origin, RoutedPayload
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.payloads import CustomPayload, HttpPayload, KafkaPayload

MESSAGE = SourceMessage("orders", 1, 5, b"k", b"v", (), 1_700_000_000_000)
TASK = ExecutorTask("t-5")


def routed(payloads: Sequence[Any]) -> list[RoutedPayload]:
    def sender(payload: Any) -> Any:
        return cast(
            "Any", SimpleNamespace(sink=SimpleNamespace(takes_idempotency_key=type(payload) is not KafkaPayload))
        )

    return [RoutedPayload(sender(payload), payload) for payload in payloads]


def keys(origin: Origin, group: str = "g", count: int = 1) -> list[str]:
    given = routed([HttpPayload(data=1)] * count)
    name_payloads(given, origin, group)
    return [each.payload.idempotency_key for each in given]


def origin(*sources: SourceMessage, task: ExecutorTask | None = TASK, hook: str = "on_task_complete") -> Origin:
    return Origin(sources or (MESSAGE,), task, hook=hook)


def test_the_same_work_has_the_same_keys_and_each_payload_its_own() -> None:
    first = keys(origin(), count=3)
    again = keys(
        Origin([msgspec.structs.replace(MESSAGE)], ExecutorTask("t-5", ["-v"]), 7, "on_task_complete"), count=3
    )
    assert first == again
    assert len(set(first)) == 3


def test_other_work_has_other_keys() -> None:
    def changed(**fields: Any) -> Origin:
        return origin(msgspec.structs.replace(MESSAGE, **fields))

    others = [
        keys(origin()),
        keys(origin(), group="other"),
        keys(origin(hook="on_window_complete")),
        keys(origin(task=None)),
        keys(origin(task=ExecutorTask("None"))),
        keys(origin(task=ExecutorTask("t-\udc80"))),
        keys(origin(MESSAGE, MESSAGE)),
        keys(changed(topic="order")),
        keys(changed(partition=2)),
        keys(changed(offset=6)),
        keys(changed(timestamp=1)),
        keys(changed(key=None)),
        keys(changed(key=b"")),
        keys(changed(key=b"kv", value=b"")),
        keys(changed(value=None)),
    ]
    assert len({key for (key,) in others}) == len(others)


@pytest.mark.parametrize(
    ("sources", "payload"),
    [
        ([MESSAGE], HttpPayload(data=1, idempotency_key="mine")),
        ([MESSAGE], KafkaPayload(data=1)),
        ([MESSAGE], CustomPayload(data=1)),
        ([], HttpPayload(data=1)),
    ],
)
def test_a_key_that_was_given_stays_and_payloads_without_one_are_left_alone(sources: list[Any], payload: Any) -> None:
    given = routed([payload])
    name_payloads(given, Origin(sources), "g")
    assert given[0].payload is payload
