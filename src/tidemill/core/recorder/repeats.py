"""Recognises frames that were received before: an engine that lost its link sends unconfirmed frames again.

Invariant: an engine numbers its frames upwards from 1 and sends them in order, so one number per engine tells which
frames are known. Engines come and go; the numbers of the engines that have been silent longest are forgotten.
"""

from __future__ import annotations

#: More engines than any pipeline has at once; the last frames of a forgotten engine would be recorded twice.
MAX_ENGINES = 4096


class KnownFrames:
    """The highest frame number of each engine.

    Args:
        max_engines: The number of engines that are remembered.
    """

    def __init__(self, max_engines: int = MAX_ENGINES) -> None:
        self._max_engines = max_engines
        self._highest: dict[str, int] = {}

    def is_new(self, engine_id: str, seq: int) -> bool:
        """Return whether a frame is new, and remember it.

        Example:
            >>> known = KnownFrames()
            >>> known.is_new("a", 1), known.is_new("a", 1), known.is_new("a", 2)
            (True, False, True)
        """
        highest = self._highest.pop(engine_id, None)
        if highest is None and len(self._highest) >= self._max_engines:
            del self._highest[next(iter(self._highest))]
        new = highest is None or seq > highest
        self._highest[engine_id] = seq if highest is None else max(highest, seq)
        return new
