"""The clock of a host that is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tidemill.runtime.store_clock import STORE_CLOCK, read_elapsed_us

#: Sets how far the clock of this host is ahead, in seconds, as it is known after the next answer of the store.
SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    read, shown = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: read() + shown[0])
    monkeypatch.setattr(time, "time", lambda: (read() + shown[0]) / 1e9)
    monkeypatch.setattr(STORE_CLOCK, "reading", None)

    def set_clock(seconds: float) -> None:
        shown[0] = round(seconds * 1e9)
        STORE_CLOCK.note(read() // 1000, read_elapsed_us())

    return set_clock
