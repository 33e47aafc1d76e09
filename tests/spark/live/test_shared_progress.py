"""Whoever asks within a beat gets the same sums, and they are never older than that."""

from __future__ import annotations

import threading

import pytest

from tidemill.spark.live.shared_progress import SharedProgress
from tidemill.spark.progress import PipelineProgress


def test_engines_are_added_up_once_per_beat_for_all_who_ask() -> None:
    clock, read = [100.0], []

    def add_up() -> PipelineProgress:
        read.append(clock[0])
        return PipelineProgress(consumed=len(read))

    shared = SharedProgress(add_up, 0.25, lambda: clock[0])
    first = shared()
    clock[0] = 100.24
    assert shared() is first
    clock[0] = 100.25
    assert shared().consumed == 2
    assert shared() is not first
    assert read == [100.0, 100.25]


def test_an_error_is_not_kept() -> None:
    answers: list[PipelineProgress | Exception] = [LookupError("not yet"), PipelineProgress(consumed=7)]

    def add_up() -> PipelineProgress:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = SharedProgress(add_up)
    with pytest.raises(LookupError):
        shared()
    assert shared().consumed == 7


def test_those_who_ask_at_the_same_time_share_one_addition() -> None:
    together, go_on = threading.Barrier(4), threading.Event()
    read, found = [], []

    def add_up() -> PipelineProgress:
        read.append(1)
        assert go_on.wait(60)
        return PipelineProgress()

    shared = SharedProgress(add_up, 60.0)

    def ask() -> None:
        together.wait(60)
        found.append(shared())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    together.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert (len(read), len({id(one) for one in found}), len(found)) == (1, 1, 3)
