"""The sums over many engines: the same as one after the other, and no work that grows with pairs of engines."""

from __future__ import annotations

import pytest

from tidemill.runtime.link.progress import EngineProgress, SinkStats
from tidemill.runtime.loop import durations
from tidemill.runtime.loop.durations import Durations
from tidemill.spark import progress as sums
from tidemill.spark.progress import sum_progress


def make_engine(number: int) -> EngineProgress:
    took = Durations([number, 1], float(number))
    stats = SinkStats(
        number, 10 * number, 1, number, 2, 3, 4, number % 3, took, 5,
        last_error=f"error {number}", last_error_at=float(number), last_delivered_at=float(-number),
    )  # fmt: skip
    return EngineProgress(consumed=number, rss_bytes=7, cpu_seconds=0.5, hooks={"arrange": took}, sinks={"s": stats})


def test_numbers_of_sinks_and_hooks_of_many_engines_are_added_up() -> None:
    total = sum_progress([make_engine(1)], [make_engine(2), make_engine(5)])
    assert (total.consumed, total.rss_bytes, total.cpu_seconds) == (8, 14, 1.5)
    assert total.hooks == {"arrange": Durations([8, 3], 8.0)}
    assert total.sinks == {
        "s": SinkStats(
            8, 80, 3, 8, 6, 9, 12, 2, Durations([8, 3], 8.0), 15,
            last_error="error 5", last_error_at=5.0, last_delivered_at=-1.0,
        )
    }  # fmt: skip


def test_the_durations_of_a_sink_are_added_up_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(parts: object) -> Durations:
        calls.append(parts)
        return durations.sum_durations(parts)  # type: ignore[arg-type]

    monkeypatch.setattr(sums, "sum_durations", count)
    sum_progress([], [make_engine(number) for number in range(2)])
    few = len(calls)
    sum_progress([], [make_engine(number) for number in range(100)])
    assert len(calls) == 2 * few


def test_what_several_engines_did_with_a_partition_is_added_up_and_the_rest_taken_over() -> None:
    past = EngineProgress(flow={"t/0": (5, 3, 2), "t/1": (1, 1, 0)}, committed={"t/0": 30, "t/1": 9})
    now = [
        EngineProgress(flow={"t/0": (7, 4, 0), "t/2": (2, 0, 0)}, committed={"t/0": 28}),
        EngineProgress(flow={"t/3": (4, 4, 0), "t/0": (1, 0, 0)}, committed={"t/3": 4}),
    ]
    total = sum_progress([past], now)
    assert total.flow == {"t/0": (13, 7, 2), "t/1": (1, 1, 0), "t/2": (2, 0, 0), "t/3": (4, 4, 0)}
    assert total.committed == {"t/0": 30, "t/1": 9, "t/3": 4}
    assert past.flow == {"t/0": (5, 3, 2), "t/1": (1, 1, 0)}, "what is added up is not changed"
