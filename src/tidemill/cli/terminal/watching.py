"""Shows a run: a status line on a terminal, log entries otherwise, and a summary at the end.

Errors here never affect the run.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tidemill.cli.terminal.status_text import format_summary

if TYPE_CHECKING:
    from tidemill.spark.progress import PipelineProgress
    from tidemill.spark.run_state import RunState

#: Without a terminal: the interval of log entries, and how often to check for a change of state, which is logged too.
PLAIN_SECONDS = 10.0
_LOOK_SECONDS = 0.5
#: A shorter period makes the rate jumpy, a longer one hides a stall.
RATE_SECONDS = 3.0


@contextlib.contextmanager
def watch(
    text: Callable[[float, int], str],
    moment: Callable[[], tuple[RunState, PipelineProgress]],
    fields: Callable[[RunState, PipelineProgress, float], dict[str, Any]],
    *,
    plain: bool,
    rate_seconds: float = RATE_SECONDS,
) -> Iterator[None]:
    """Show a run during the block.

    Args:
        text: Returns the status line for a rate of messages per second and a number of columns.
        moment: Returns the current state and progress of the run.
        fields: Returns the fields of a log entry.
        plain: Show no status line, even on a terminal.
        rate_seconds: The period over which the line's rate is measured.
    """
    from tidemill.spark.rate import Rate

    if not plain and sys.stderr.isatty():
        from tidemill.cli.terminal.status_line import StatusLine

        rate = Rate(rate_seconds)

        def draw(width: int) -> str:
            return text(rate.add(time.monotonic(), moment()[1].messages_done), width)

        with StatusLine(draw):
            yield
        return
    ended = threading.Event()
    reporter = _Reporter(moment, fields)
    thread = threading.Thread(target=reporter.run, args=(ended,), name="tidemill-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)


class _Reporter:
    """Logs the progress of a run periodically."""

    def __init__(
        self,
        moment: Callable[[], tuple[RunState, PipelineProgress]],
        fields: Callable[[RunState, PipelineProgress, float], dict[str, Any]],
    ) -> None:
        from tidemill.spark.rate import Rate

        self._moment = moment
        self._fields = fields
        self._rate = Rate(PLAIN_SECONDS)
        self._due = EntryTimer(PLAIN_SECONDS)

    def run(self, ended: threading.Event) -> None:
        import structlog

        log = structlog.get_logger(__name__)
        while not ended.wait(_LOOK_SECONDS):
            with contextlib.suppress(Exception):
                state, progress = self._moment()
                now = time.monotonic()
                rate = self._rate.add(now, progress.messages_done)
                if self._due.is_due(now, describe_change(state, progress)):
                    log.info("status", **self._fields(state, progress, rate))


class EntryTimer:
    """Decides when an entry is due: at each change, and after a time without one.

    Args:
        seconds: The longest time between two entries.

    Example:
        >>> due = EntryTimer(10.0)
        >>> [due.is_due(now, state) for now, state in ((0, "a"), (5, "a"), (10, "a"), (11, "b"), (20, "b"), (21, "b"))]
        [True, False, True, True, False, True]
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: tuple[float, object] | None = None

    def is_due(self, now: float, state: object) -> bool:
        """Return whether an entry is due now; if so, record it as written."""
        if self._last is not None and self._last[1] == state and now - self._last[0] < self._seconds:
            return False
        self._last = now, state
        return True


def describe_change(state: RunState, progress: PipelineProgress) -> object:
    """Return the state of a run that log entries report as soon as it changes."""
    running = sum(engine.state == "running" for engine in progress.engines)
    return state.phase, state.step, running, len(progress.engines), sorted(progress.waits), bool(progress.partitions)


def list_fields(state: RunState, progress: PipelineProgress, rate: float) -> dict[str, Any]:
    """Return the fields of a pipeline's log entry; counts that are zero are left out."""
    running = sum(engine.state == "running" for engine in progress.engines)
    fields: dict[str, Any] = {"state": state.phase.value}
    if state.step:
        fields["waits_for"] = state.describe_step()
    if state.left_seconds is not None:
        fields["left_seconds"] = round(state.left_seconds)
    if not progress.engines:
        return fields
    return fields | {
        "engines": f"{running}/{len(progress.engines)}",
        "partitions": len(progress.partitions),
        "messages_done": progress.messages_done,
        "per_second": round(rate),
        "in_flight": progress.in_flight,
        "lag": sum(progress.lag.values()) if progress.lag else None,
        "tasks_running": progress.tasks_running,
        **{
            name: number
            for name, number in (
                ("tasks_queued", progress.tasks_queued),
                ("tasks_failed", progress.tasks_failed),
                ("dead_lettered", progress.dead_lettered),
                ("letters_dropped", progress.letters_dropped),
                ("recorder_dropped", progress.recorder_dropped),
            )
            if number
        },
        **({"waits_for": progress.waits} if progress.waits else {}),
    }


def show_summary(progress: PipelineProgress, seconds: float, gap: int = 0) -> None:
    """Show the summary of a run: as text if logs are for people, otherwise as a log entry; see `format_summary`."""
    import structlog

    from tidemill.runtime.log.setup import is_for_people

    if is_for_people():
        with contextlib.suppress(OSError):  # the terminal was closed
            print(format_summary(progress, seconds, gap), file=sys.stderr, flush=True)
        return
    structlog.get_logger(__name__).info(
        "summary",
        messages_done=progress.messages_done,
        seconds=round(seconds, 1),
        per_second=round(progress.messages_done / seconds, 1) if seconds else 0.0,
        tasks_done=progress.tasks_done,
        tasks_failed=progress.tasks_failed,
        tasks_retried=progress.tasks_retried,
        dead_letters=progress.letter_kinds,
        letters_dropped=progress.letters_dropped,
        recorder_dropped=progress.recorder_dropped,
        gap=gap,
        sinks={
            name: {
                "delivered": sink.delivered_payloads,
                "refused": sink.refused,
                "skipped": sink.skipped,
                "dead_lettered": sink.dead_lettered,
            }
            for name, sink in sorted(progress.sinks.items())
        },
    )
