"""Finds the engines of a bounded run that have fallen silent, and the parts of the run that have hung too often.

A hanging engine is killed, and Spark runs its part again; without a limit this could repeat for ever.

Invariants, each a property test:
1. An engine is reported once, and only if it was silent for `silent_seconds` while ticks came on time.
2. The engine of a part is killed fewer than `max_hangs` times before the run is given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hung:
    """An engine that was silent for too long.

    Attributes:
        link: The engine's link.
        part: The engine's part of the run.
        times: How many engines of this part have hung, including this one.
        give_up: Whether the limit is reached.
    """

    link: int
    part: int
    times: int
    give_up: bool


class SilenceWatch:
    """Records the heartbeats of engines and reports the engines that hang at each tick.

    Args:
        silent_seconds: The silence after which an engine counts as hanging.
        tick_seconds: The interval between ticks. If a tick is late by more than that, no engine is blamed: the driver
            itself was not running, and heartbeats that arrived meanwhile are still unread.
        max_hangs: The number of hangs of one part after which the run is given up.
    """

    def __init__(self, silent_seconds: float = 15.0, tick_seconds: float = 1.0, max_hangs: int = 4) -> None:
        self._silent_seconds = silent_seconds
        self._late_seconds = 2 * tick_seconds
        self._max_hangs = max_hangs
        self._parts: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._hangs: dict[int, int] = {}
        self._ticked: float | None = None

    def note_joined(self, link: int, part: int, now: float) -> None:
        """Start watching a new engine."""
        self._parts[link] = part
        self._heard[link] = now

    def note_heartbeat(self, link: int, now: float) -> None:
        if link in self._heard:
            self._heard[link] = now

    def note_left(self, link: int) -> None:
        """Stop watching an engine that has ended."""
        self._parts.pop(link, None)
        self._heard.pop(link, None)

    def tick(self, now: float) -> list[Hung]:
        """Return the engines that hang, and stop watching them."""
        late = self._ticked is not None and now - self._ticked > self._late_seconds
        self._ticked = now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
            return []
        hung = []
        for link in [link for link, heard in self._heard.items() if now - heard >= self._silent_seconds]:
            part = self._parts[link]
            times = self._hangs[part] = self._hangs.get(part, 0) + 1
            hung.append(Hung(link, part, times, times >= self._max_hangs))
            self.note_left(link)
        return hung
