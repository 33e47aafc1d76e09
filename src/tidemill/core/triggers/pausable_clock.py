"""A clock that can be held, so that deadlines measured with it do not pass meanwhile."""

from __future__ import annotations


class PausableClock:
    """Converts readings of a monotonic clock into readings of a clock that can be held.

    Invariants: it never goes backwards; it does not advance while it is held; holding it twice has no further effect.

    Example:
        >>> clock = PausableClock()
        >>> clock.hold(10.0)
        >>> clock.read(14.0)
        10.0
        >>> clock.release(15.0)
        >>> clock.read(16.0)
        11.0
    """

    __slots__ = ("_held_at", "_lost")

    def __init__(self) -> None:
        self._held_at: float | None = None
        self._lost = 0.0

    def read(self, now: float) -> float:
        """Return the time of this clock, in seconds.

        Args:
            now: The time of the monotonic clock.
        """
        return (now if self._held_at is None else self._held_at) - self._lost

    def hold(self, now: float) -> None:
        """Stop the clock."""
        if self._held_at is None:
            self._held_at = now

    def release(self, now: float) -> None:
        """Let the clock continue."""
        if self._held_at is not None:
            self._lost += now - self._held_at
            self._held_at = None
