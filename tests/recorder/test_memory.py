"""When the memory that sealing needs is given back."""

from __future__ import annotations

import pytest

from tidemill.recorder import kept_memory
from tidemill.recorder.kept_memory import KEEP_SECONDS, RELEASE_SECONDS, KeptMemory


class Times:
    """A clock, and when memory was released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.released: list[float] = []
        monkeypatch.setattr(kept_memory, "release_memory", lambda: self.released.append(self.now))
        self.kept = KeptMemory(lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick each second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.kept.tick()


def test_memory_is_kept_while_segments_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    for _ in range(5):
        times.kept.note_use()
        times.wait(KEEP_SECONDS - 1)
    assert times.released == []
    times.wait(5)
    assert times.released == [100.0 + 5 * (KEEP_SECONDS - 1) + 1]


def test_it_is_given_back_once_a_minute_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    times.wait(2 * RELEASE_SECONDS)
    for _ in range(30):
        times.kept.note_use()
        times.wait(KEEP_SECONDS - 1)
    assert times.released == [100.0 + RELEASE_SECONDS * n for n in range(1, 7)]
