"""One budget of time that several steps share, so that their sum never exceeds it."""

from __future__ import annotations

import asyncio


class Deadline:
    """A point in time by which several steps have to end, one after the other; needs a running event loop.

    Args:
        seconds: The budget, from now on.
    """

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self._at = asyncio.get_running_loop().time() + seconds

    @property
    def left_seconds(self) -> float:
        """What is left of the budget."""
        return max(0.0, self._at - asyncio.get_running_loop().time())

    def before(self, seconds: float) -> Deadline:
        """Return an earlier deadline, which keeps this many seconds for the steps after it."""
        return Deadline(self._at - seconds - asyncio.get_running_loop().time())

    def limit(self, most_seconds: float | None = None, *, least_seconds: float = 0.0) -> asyncio.Timeout:
        """Return a context manager that ends a step with a `TimeoutError` at the deadline.

        Args:
            most_seconds: The step gets up to this, however much is left.
            least_seconds: It gets this much even if it comes too late.
        """
        seconds = max(least_seconds, self.left_seconds)
        return asyncio.timeout(seconds if most_seconds is None else min(most_seconds, seconds))
