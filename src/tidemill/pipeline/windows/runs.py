"""What windows share whose messages go through delivery as a run: see `sinks.sending.run`."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.pipeline.windows.window import WindowRun


def may_run(window: WindowRun) -> bool:
    """Return whether nothing is to happen to a single message of a window, as far as can be known."""
    context = window.context
    if len(window.messages) == 1 or context.overridden.on_message_complete:
        return False
    return context.brake is None


def release_run(window: WindowRun, indexes: Sequence[int], size_bytes: int) -> None:
    """Go on with messages whose deliveries are settled; `size_bytes`: how large these were."""
    if not window.partition.closed:
        window.partition.delivered(size_bytes, len(indexes))
        resolve_run(window, window.graph.release_all(indexes))


def resolve_run(window: WindowRun, indexes: Sequence[int]) -> None:
    """Let messages leave the pipeline together."""
    if not indexes:
        return
    messages, entries, runs = window.messages, window.entries, window.runs_of
    if len(indexes) < len(messages):
        messages, entries = [messages[index] for index in indexes], [entries[index] for index in indexes]
        runs = [runs[index] for index in indexes]
    window.partition.resolve_all(messages, entries, runs, window.times)
