"""Runs of payloads: what is released together, and what by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.sending.delivery_batch import BatchPart, DeliveryBatch, settle_all
from tidemill.sinks.sending.submission import Submission


class Releases:
    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, indexes: Sequence[int], size_bytes: int) -> None:
        self.calls.append((list(indexes), size_bytes))


def make_parts(count: int, payloads: int = 1) -> tuple[Releases, list[BatchPart]]:
    releases = Releases()
    run = DeliveryBatch("transform", releases)
    parts = [BatchPart(run, index, SourceMessage("t", 0, index), payloads) for index in range(count)]
    for part in parts:
        part.origin.size_bytes += 10 * payloads
    return releases, parts


def test_what_one_answer_settles_is_released_by_one_call() -> None:
    releases, parts = make_parts(3)
    settle_all(parts[:2])
    assert releases.calls == [([0, 1], 20)]
    settle_all(parts[2:])
    assert releases.calls == [([0, 1], 20), ([2], 10)]


def test_a_message_is_released_with_the_last_of_its_payloads() -> None:
    releases, parts = make_parts(2, payloads=2)
    settle_all([parts[0], parts[1], parts[1]])
    assert releases.calls == [([1], 20)]
    parts[0].settle()
    assert releases.calls == [([1], 20), ([0], 20)]


def test_parts_of_a_run_are_released_together_whatever_is_between_them() -> None:
    first, of_first = make_parts(2)
    second, of_second = make_parts(2)
    released: list[str] = []
    other = Submission(None, 1, lambda: released.append("other"))
    settle_all([of_first[0], of_second[0], other, of_second[1], of_first[1]])
    assert first.calls == [([0, 1], 20)]
    assert second.calls == [([0, 1], 20)]
    assert released == ["other"]


def test_a_part_says_where_it_comes_from() -> None:
    _, parts = make_parts(2)
    origin = parts[1].origin
    assert ([source.offset for source in origin.sources], origin.task, origin.hook) == ([1], None, "transform")


async def test_a_release_that_raises_is_told_to_the_loop_and_the_others_are_released() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def explode(indexes: Sequence[int], size_bytes: int) -> None:
        raise LookupError("a bug")

    broken = BatchPart(DeliveryBatch("transform", explode), 0, SourceMessage("t", 0, 0), 1)
    releases, parts = make_parts(1)
    settle_all([broken, *parts])
    assert releases.calls == [([0], 10)]
    assert [type(context["exception"]) for context in told] == [LookupError]
