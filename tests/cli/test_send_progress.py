"""What `tidemill send` shows of a long input: nothing of a short one."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from tidemill.cli.topics.send_progress import SendProgress, SentCounts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("messages", "seconds"), [(999, 60.0), (1_000_000, 0.9)])
def test_a_short_input_needs_no_line(clock: list[float], messages: int, seconds: float) -> None:
    progress = SendProgress(io.BytesIO(), lambda: SentCounts(messages, 0, 0))
    clock[0] += seconds
    assert progress.draw(79) == ""
    assert progress.describe_time(messages) == ""


def test_the_share_of_a_file_and_the_time_left_are_shown_as_far_as_they_fit(clock: list[float], tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"x" * 1_000)
    with (tmp_path / "lines").open("rb") as lines:
        progress = SendProgress(lines, lambda: SentCounts(420_000, 7, 250))
    clock[0] += 10
    assert progress.draw(79) == "420,000 messages sent | 42,000/s | 7 failed | 25% read, 30 s left"
    assert progress.draw(40) == "420,000 sent | 42,000/s | 7 failed | 25%"
    assert progress.draw(24) == "420,000 sent | 7 failed"
    clock[0] += 5
    assert progress.describe_time(840_000) == " in 15 s, 56,000/s"


def test_how_much_a_pipe_still_has_is_unknown(clock: list[float]) -> None:
    progress = SendProgress(io.BytesIO(), lambda: SentCounts(5_000, 0, 250))
    clock[0] += 2
    assert progress.draw(79) == "5,000 messages sent | 2,500/s"


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    progress = SendProgress(io.BytesIO(), lambda: (_ for _ in ()).throw(RuntimeError))
    with progress.showing():
        pass
    assert capsys.readouterr() == ("", "")
