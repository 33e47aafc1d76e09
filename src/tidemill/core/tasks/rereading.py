"""Schedules the repeated import of unchanged DAG files, whose external inputs may have changed.

Importing costs time: at most `SHARE` of a core is spent on it. If that is not enough, files are imported less often
than requested.
"""

from __future__ import annotations

from typing import Final

#: The fraction of a core.
SHARE: Final = 0.1


def find_interval(asked_seconds: float, cpu_seconds: float) -> float:
    """Return the time from one import to the next.

    Args:
        asked_seconds: `dags.reparse_seconds`.
        cpu_seconds: The CPU time of one import.

    Example:
        >>> find_interval(60.0, 0.5), find_interval(60.0, 30.0)
        (60.0, 300.0)
    """
    return max(asked_seconds, cpu_seconds / SHARE)


def find_pause(cpu_seconds: float) -> float:
    """Return the pause between an import and the import of the next file."""
    return cpu_seconds / SHARE - cpu_seconds


class Rereading:
    """Chooses the unchanged file to read again next.

    Args:
        asked_seconds: The shortest interval at which each file is read.
    """

    def __init__(self, asked_seconds: float) -> None:
        self._asked_seconds = asked_seconds
        #: When each file was last read.
        self._read: dict[str, float] = {}
        self._paused_until = 0.0

    def note_read(self, name: str, now: float) -> None:
        """Record that a file was read, for whatever reason."""
        self._read[name] = now

    def note_cost(self, cpu_seconds: float, now: float) -> None:
        """Record the cost of reading a file again."""
        self._paused_until = now + find_pause(cpu_seconds)

    def forget(self, name: str) -> None:
        """Record that a file was removed."""
        self._read.pop(name, None)

    def find_due(self, now: float) -> str | None:
        """Return the file that has waited longest, if one is due."""
        if now < self._paused_until or not self._read:
            return None
        name = min(self._read, key=self._read.__getitem__)
        return name if now >= self._read[name] + self._asked_seconds else None
