"""Decides when an open segment is sealed, and when a new period begins."""

from __future__ import annotations

from dataclasses import dataclass

#: Decoded rows are held in memory until their segment is sealed. Task output is large; message rows are small.
MAX_OPEN_BYTES = 24 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """The limits of an open segment.

    Attributes:
        max_rows: The maximum number of rows.
        max_age_seconds: The maximum age of its first row.
        max_bytes: The maximum size of its decoded rows.
    """

    max_rows: int = 100_000
    max_age_seconds: float = 600.0
    max_bytes: int = MAX_OPEN_BYTES

    def is_full(self, rows: int, size_bytes: int, age_seconds: float) -> bool:
        """Return whether a segment has to be sealed; an empty segment never is.

        If the clock was set back, the age is negative, and the rows or bytes decide.

        Example:
            >>> SealPolicy().is_full(99_999, 0, 0.0), SealPolicy().is_full(100_000, 0, 0.0)
            (False, True)
        """
        if rows == 0:
            return False
        return rows >= self.max_rows or size_bytes >= self.max_bytes or age_seconds >= self.max_age_seconds


def is_period_over(age_seconds: float, rotation_seconds: float) -> bool:
    """Return whether a new period begins; `age_seconds` is measured with a monotonic clock."""
    return age_seconds >= rotation_seconds
