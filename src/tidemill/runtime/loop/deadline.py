"""One time budget that several steps share, so that their sum never exceeds it."""

from __future__ import annotations

import asyncio


class Deadline:
    """A point in time by which several consecutive steps have to end; needs a running event loop.

    Args:
        seconds: The budget, from now on.
    """

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self._at = asyncio.get_running_loop().time() + seconds

    @property
    def left_seconds(self) -> float:
        """The rest of the budget."""
        return max(0.0, self._at - asyncio.get_running_loop().time())

    def before(self, seconds: float) -> Deadline:
        """Return an earlier deadline, which reserves this many seconds for later steps."""
        return Deadline(self._at - seconds - asyncio.get_running_loop().time())

    def limit(self, most_seconds: float | None = None, *, least_seconds: float = 0.0) -> asyncio.Timeout:
        """Return a context manager that ends a step with a `TimeoutError` at the deadline.

        Args:
            most_seconds: The step's maximum, however much time is left.
            least_seconds: The step's minimum, even after the deadline.
        """
        seconds = max(least_seconds, self.left_seconds)
        return asyncio.timeout(seconds if most_seconds is None else min(most_seconds, seconds))
