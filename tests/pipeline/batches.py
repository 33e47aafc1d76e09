"""Batches of finished messages, made of single messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.pipeline.reports.report import NO_WINDOW, FinishedBatch, WindowTimes, find_end
from tidemill.runtime.kafka.source_message import SourceMessage


def make_batch(
    messages: Iterable[SourceMessage],
    runs: Sequence[Any] = (),
    window: WindowTimes = NO_WINDOW,
    rejected: str | None = None,
    resolved_ns: int = 1_700_000_003_000_000_000,
) -> FinishedBatch:
    """Return a batch of messages with the same tasks, of one window or of none."""
    batch = FinishedBatch()
    for each in messages:
        of_message = each.offset, each.key, each.timestamp, each.consumed_at
        row = (*of_message, runs, find_end(runs), resolved_ns, rejected, None)
        batch.add_rows((each.topic, each.partition), window, [row])
    return batch
