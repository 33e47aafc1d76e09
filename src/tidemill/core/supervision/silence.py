"""Which engines of a bounded run have fallen silent, and when their part has failed too often that way.

A part whose engine hangs is killed, and Spark starts it again; without a limit that could repeat for ever.

Invariants, property tests:
1. An engine is reported once, and only if nothing was heard of it for `silent_seconds` while ticks came in time.
2. A part is killed fewer than `max_hangs` times before the run is given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hung:
    """An engine that was silent for too long.

    Attributes:
        link: Its link.
        part: Its part of the run.
        times: How often engines of this part hung, this one included.
        give_up: Whether that was too often.
    """

    link: int
    part: int
    times: int
    give_up: bool


class SilenceWatch:
    """Notes heartbeats of engines, and returns at each tick which ones hang.

    Args:
        silent_seconds: An engine that is silent for this long hangs.
        tick_seconds: How often ticks are meant to come. After one that is late by more than that no engine is blamed:
            the driver itself stood still, and what engines said meanwhile is still to be read.
        max_hangs: After this many hangs of one part the run is given up.
    """

    def __init__(self, silent_seconds: float = 15.0, tick_seconds: float = 1.0, max_hangs: int = 4) -> None:
        """Start with no engine."""
        self._silent_seconds = silent_seconds
        self._late_seconds = 2 * tick_seconds
        self._max_hangs = max_hangs
        self._parts: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._hangs: dict[int, int] = {}
        self._ticked: float | None = None

    def joined(self, link: int, part: int, now: float) -> None:
        """Note a new engine."""
        self._parts[link] = part
        self._heard[link] = now

    def heard(self, link: int, now: float) -> None:
        """Note a heartbeat."""
        if link in self._heard:
            self._heard[link] = now

    def left(self, link: int) -> None:
        """Note that an engine is gone."""
        self._parts.pop(link, None)
        self._heard.pop(link, None)

    def tick(self, now: float) -> list[Hung]:
        """Return the engines that hang; they are not watched any more."""
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
            self.left(link)
        return hung
