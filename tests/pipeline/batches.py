"""Batches of finished messages, made of single messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.pipeline.reports.report import NO_WINDOW, FinishedBatch, WindowTimes
from tidemill.runtime.messages import SourceMessage


def make_batch(
    messages: Iterable[SourceMessage],
    runs: Sequence[Any] = (),
    window: WindowTimes = NO_WINDOW,
    rejected: str | None = None,
    resolved_ns: int = 1_700_000_003_000_000_000,
) -> FinishedBatch:
    """Return a batch of messages with the same tasks, of one window or of none."""
    pieces = [
        FinishedBatch.of_window(
            (each.topic, each.partition),
            window,
            [(each.offset, each.key, each.timestamp, each.consumed_at, runs, resolved_ns, rejected, None)],
        )
        for each in messages
    ]
    return FinishedBatch.join(pieces)
