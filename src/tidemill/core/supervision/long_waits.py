"""Decides which waits of engines are logged: a stall that lasts is logged once, and again at intervals while it
persists.

A status line shows every stall. Without one, in a service or a container, the log has to say why a partition makes no
progress.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The duration after which a stall is reported.
FIRST_SECONDS = 5.0
#: The interval at which a persisting stall is reported again.
AGAIN_SECONDS = 60.0


class LongWaits:
    """The waits of all engines of a pipeline.

    Example:
        >>> waits = LongWaits()
        >>> waits.feed(0, {"sinks.http.out": "no connection"}, 10.0)
        []
        >>> waits.feed(0, {"sinks.http.out": "no connection"}, 15.0)
        [('sinks.http.out', 'no connection')]
    """

    def __init__(self) -> None:
        self._due: dict[int, dict[str, float]] = {}

    def feed(self, engine: int, waits: Mapping[str, str], now: float) -> list[tuple[str, str]]:
        """Process the waits of an engine; return the ones to report as (name, reason).

        Args:
            engine: The engine's number.
            waits: The names of everything the engine waits for now, with the reasons.
            now: Seconds of a monotonic clock.
        """
        if not waits:
            self._due.pop(engine, None)
            return []
        before = self._due.get(engine, {})
        due = {name: before.get(name, now + FIRST_SECONDS) for name in waits}
        reports = [(name, waits[name]) for name, moment in due.items() if now >= moment]
        due |= {name: now + AGAIN_SECONDS for name, _ in reports}
        self._due[engine] = due
        return reports
