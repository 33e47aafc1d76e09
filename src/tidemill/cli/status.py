"""The live status line of `tidemill run`: what all engines do together, on a terminal only.

It only shows: an error here never reaches the pipeline.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.spark.progress import PipelineProgress

_STARTING = "starting Spark and the engines"
_REFRESH_SECONDS = 0.25
#: The rate covers the last seconds: a shorter span is jumpy, a longer one hides a standstill.
_RATE_SECONDS = 3.0


class Rate:
    """Messages per second over the last few seconds."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: list[tuple[float, int]] = []

    def add(self, now: float, count: int) -> float:
        """Add a count and return the rate."""
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SECONDS:
            self._samples.pop(0)
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0


def format_status(progress: PipelineProgress, rate: float) -> str:
    """Describe in one line what a pipeline does.

    Args:
        progress: The pipeline's progress.
        rate: Messages per second.
    """
    if not any(engine.progress for engine in progress.engines):
        return _STARTING
    running = sum(engine.state == "running" for engine in progress.engines)
    parts = [
        f"{running} of {len(progress.engines)} engines, {len(progress.partitions)} partitions",
        f"{progress.messages_done:,} messages done, {rate:,.0f}/s",
        "tasks: " + _format_tasks(progress),
        f"lag {format_lag(progress)}, {progress.in_flight:,} in flight",
    ]
    if progress.dead_lettered:
        parts.append(f"{progress.dead_lettered:,} dead letter{'s' if progress.dead_lettered != 1 else ''}")
    if progress.letters_dropped:
        parts.append(f"{progress.letters_dropped:,} dead letter{'s' if progress.letters_dropped != 1 else ''} DROPPED")
    if progress.stalled:
        reasons = (f"{name}: {why}" for name, why in sorted(progress.stalled.items()))
        parts.append("waiting for " + "; ".join(reasons))
    return " | ".join(parts)


def format_lag(progress: PipelineProgress) -> str:
    """Return how many messages are not committed, and for how many partitions this is not known yet."""
    known, owned = len(progress.lag), len(progress.partitions)
    if not known and owned:
        return "not known yet"
    unknown = f" ({owned - known:,} of {owned:,} partitions not known yet)" if known < owned else ""
    return f"{sum(progress.lag.values()):,}{unknown}"


def _format_tasks(progress: PipelineProgress) -> str:
    counts = (
        ("queued", progress.tasks_queued),
        ("in backoff", progress.tasks_retrying),
        ("failed", progress.tasks_failed),
    )
    return ", ".join([f"{progress.tasks_running:,} running", *(f"{count:,} {name}" for name, count in counts if count)])


@contextlib.contextmanager
def live_status(progress: Callable[[], PipelineProgress], *, plain: bool = False) -> Iterator[None]:
    """Show a status line while the block runs, if standard error is a terminal.

    Args:
        progress: Returns the pipeline's progress; called from a thread.
        plain: Show nothing.
    """
    if plain or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots", _STARTING)
    ended = threading.Event()
    rate = Rate()

    def refresh() -> None:
        while not ended.wait(_REFRESH_SECONDS):
            # A failing display must not make the pipeline fail.
            with contextlib.suppress(Exception):
                now = progress()
                spinner.update(text=format_status(now, rate.add(time.monotonic(), now.messages_done)))

    thread = threading.Thread(target=refresh, name="tidemill-status", daemon=True)
    # Log lines go through sys.stderr, which the display replaces: they appear above the status line.
    console = Console(stderr=True)
    with Live(spinner, console=console, transient=True, refresh_per_second=1 / _REFRESH_SECONDS):
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)
