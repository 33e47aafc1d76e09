"""Which frames of engines were taken before: an engine that lost its link sends those again that were not confirmed.

Invariant: an engine numbers its frames upwards from 1 and sends them in order, so that one number per engine says which
are known. Engines come and go; the numbers of the least recently heard are forgotten.
"""

from __future__ import annotations

#: More than any pipeline has at a time; an engine that was forgotten would have its last frames recorded twice.
MAX_ENGINES = 4096


class KnownFrames:
    """The highest frame number of each engine.

    Args:
        max_engines: How many engines are remembered.
    """

    def __init__(self, max_engines: int = MAX_ENGINES) -> None:
        self._max_engines = max_engines
        self._highest: dict[str, int] = {}

    def is_new(self, engine_id: str, seq: int) -> bool:
        """Tell whether a frame was not seen before; it is from now on.

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
