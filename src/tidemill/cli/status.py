"""The live status line of `tidemill run`: what all engines together do, on a terminal only.

Shows, decides nothing: an error here never reaches the pipeline.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.runtime.progress import EngineProgress

_REFRESH_SECONDS = 0.25
#: The rate is that of the last seconds: shorter jumps, longer hides a stop.
_RATE_SECONDS = 3.0

Engines = Sequence["EngineProgress"]


class Rate:
    """Messages per second over the last few seconds."""

    def __init__(self) -> None:
        """Start without any sample."""
        self._samples: list[tuple[float, int]] = []

    def add(self, now: float, count: int) -> float:
        """Take a new count and return the rate."""
        # A restarted engine counts from zero again.
        if self._samples and count < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SECONDS:
            self._samples.pop(0)
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0


def status_text(engines: Engines, rate: float) -> str:
    """Say in one line what the engines do.

    Args:
        engines: The last progress of each.
        rate: Messages per second.
    """
    if not engines:
        return "starting Spark and the engines"
    done = sum(engine.messages_done for engine in engines)
    tasks = [f"{sum(engine.tasks_running for engine in engines):,} running"]
    for name, count in (
        ("queued", sum(engine.tasks_queued for engine in engines)),
        ("in back-off", sum(engine.tasks_retrying for engine in engines)),
        ("failed", sum(engine.tasks_failed for engine in engines)),
    ):
        if count:
            tasks.append(f"{count:,} {name}")
    parts = [
        f"{len(engines)} engine{'s' if len(engines) != 1 else ''}, "
        f"{sum(len(engine.partitions) for engine in engines)} partitions",
        f"{done:,} messages done, {rate:,.0f}/s",
        "tasks: " + ", ".join(tasks),
        f"lag {sum(sum(engine.lag.values()) for engine in engines):,}",
    ]
    letters = sum(engine.dead_lettered for engine in engines)
    if letters:
        parts.append(f"{letters:,} dead letters")
    stalled = sorted({f"{name}: {why}" for engine in engines for name, why in engine.stalled.items()})
    if stalled:
        parts.append("waiting for " + "; ".join(stalled))
    return " | ".join(parts)


@contextlib.contextmanager
def live_status(progress: Callable[[], Engines], *, plain: bool = False) -> Iterator[None]:
    """Show a status line while the block runs, if standard error is a terminal.

    Args:
        progress: Returns the last progress of each engine; called from a thread.
        plain: Show nothing at all.
    """
    if plain or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots", status_text((), 0.0))
    ended = threading.Event()
    rate = Rate()

    def refresh() -> None:
        while not ended.wait(_REFRESH_SECONDS):
            # A display that fails must not be the reason why a pipeline does.
            with contextlib.suppress(Exception):
                engines = progress()
                done = sum(engine.messages_done for engine in engines)
                spinner.update(text=status_text(engines, rate.add(time.monotonic(), done)))

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
