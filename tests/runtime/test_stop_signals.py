"""Which signals ask a command to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tidemill.runtime.process.stop_signals import find_stop_signals
from tidemill.spark.foreground import note_signals


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_terminal_asks_for_a_drain_as_sigterm_does() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    noted: list[int] = []
    with note_signals(lambda: noted.append(1)):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(noted) == 2
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in find_stop_signals()
    noted: list[int] = []
    with note_signals(lambda: noted.append(1)):
        os.kill(os.getpid(), signal.SIGHUP)
    assert noted == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
