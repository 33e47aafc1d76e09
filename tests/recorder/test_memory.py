"""When the memory that sealing needs is given back."""

from __future__ import annotations

import pytest

from tidemill.recorder import memory
from tidemill.recorder.memory import KEEP_SECONDS, KeptMemory


def test_memory_is_kept_while_segments_follow_each_other_and_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, released = [100.0], list[float]()
    monkeypatch.setattr(memory, "release_memory", lambda: released.append(now[0]))
    kept = KeptMemory(lambda: now[0])
    kept.tick()
    for _ in range(5):
        kept.note_use()
        now[0] += KEEP_SECONDS - 1
        kept.tick()
    assert released == []
    now[0] += 1
    kept.tick()
    kept.tick()
    now[0] += 10 * KEEP_SECONDS
    kept.tick()
    assert released == [100.0 + 5 * (KEEP_SECONDS - 1) + 1]
