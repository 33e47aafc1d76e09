"""The pauses that users have requested, and when they end.

A pause covers all partitions or one, and always ends by itself. Invariants: a partition is paused as long as a pause of
it, or of all partitions, has not ended; a later pause of the same partitions replaces the earlier one; each pause ends
once. All times are seconds of one monotonic clock, so that setting the system clock back changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The longest pause; to wait longer, stop the pipeline.
MAX_PAUSE_SECONDS = 7 * 86_400.0
#: The shortest pause: engines take a moment to learn of it.
MIN_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause.

    Attributes:
        partition: The paused partition; None: all partitions.
        until: When the pause ends.
        by: The user who requested it.
    """

    partition: int | None
    until: float
    by: str


class Pauses:
    """The pauses of a pipeline."""

    def __init__(self) -> None:
        self._pauses: dict[int | None, Pause] = {}

    @property
    def all(self) -> list[Pause]:
        """All pauses; a pause of all partitions comes first."""
        return sorted(self._pauses.values(), key=lambda pause: -1 if pause.partition is None else pause.partition)

    @property
    def is_whole(self) -> bool:
        """Whether all partitions are paused."""
        return None in self._pauses

    @property
    def partitions(self) -> list[int]:
        """The partitions that are paused individually."""
        return sorted(partition for partition in self._pauses if partition is not None)

    @property
    def due(self) -> float | None:
        """The time of the next call to `tick`; None: never."""
        return min((pause.until for pause in self._pauses.values()), default=None)

    def pause(self, pause: Pause) -> None:
        """Start a pause, or change when it ends."""
        self._pauses[pause.partition] = pause

    def resume(self, partition: int | None) -> list[Pause]:
        """End the pause of a partition, or all pauses if it is None; return those that ended.

        Example:
            >>> pauses = Pauses()
            >>> pauses.pause(Pause(3, 60.0, "ann"))
            >>> [pause.partition for pause in pauses.resume(None)], pauses.resume(3)
            ([3], [])
        """
        if partition is None:
            ended = self.all
            self._pauses.clear()
            return ended
        pause = self._pauses.pop(partition, None)
        return [] if pause is None else [pause]

    def tick(self, now: float) -> list[Pause]:
        """End the pauses whose time is over, and return them."""
        ended = [pause for pause in self.all if pause.until <= now]
        for pause in ended:
            del self._pauses[pause.partition]
        return ended
