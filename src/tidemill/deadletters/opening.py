"""Dead letters for reading: the configuration decides here, and nowhere else, between a topic and files.

Blocking: not for event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Criteria, identity

if TYPE_CHECKING:
    from tidemill.deadletters.reader import Found, Reached
    from tidemill.deadletters.redrive.history import RedriveHistory
    from tidemill.deadletters.redrive.producer import Outgoing, Refusals


class RedriveCursor(Protocol):
    """What saves how far a redrive is."""

    def open(self) -> None:
        """Make sure that no other process does the same redrive."""

    def commit(self, records: Sequence[Outgoing], positions: Mapping[int, int]) -> Refusals:
        """Save positions, together with records if there are any; see `CursorProducer.commit`."""
        ...


class Letters(Protocol):
    """Dead letters, numbered by partition (a file is one, too) and offset; used in a `with` block.

    Attributes:
        place: Where they are, for people.
    """

    place: str

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything."""

    def ranges(self) -> dict[int, tuple[int, int]]:
        """Return the first offset and the end of each partition.

        Raises:
            ConfigError: There is no such place.
            RemoteError: It cannot be read now.
        """
        ...

    def offsets_at(self, seconds: float, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Return where to start to find every letter that was written at a time or later."""
        ...

    def committed(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, str]]:
        """Return the saved positions and what is kept beside them, without partitions that have none."""
        ...

    def cursor(self, overrides: Callable[[], Mapping[str, Any]], note: Callable[[int, int], str]) -> RedriveCursor:
        """Return what saves positions.

        Args:
            overrides: Returns what the producer of a cursor in Kafka needs on top of the configuration.
            note: Returns what is kept beside a position, by partition and position.
        """
        ...

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[Found | Reached | None]:
        """Yield what is there, in order within each partition; None now and then while nothing comes.

        Raises:
            RemoteError: It cannot be read now.
        """
        ...


def open_letters(settings: Settings, group: str = "tidemill-dlq") -> Letters:
    """Return a pipeline's dead letters.

    Args:
        settings: The pipeline's settings.
        group: The redrive whose saved positions are asked for.
    """
    if settings.dlq.path:
        from tidemill.deadletters.folder_reader import LetterFolder

        return LetterFolder(settings.dlq.path, group)
    from tidemill.deadletters.reader import LetterBox

    return LetterBox(settings, group)


def history_of(settings: Settings, letters: Letters) -> RedriveHistory:
    """Return what redrives keep about dead letters.

    Raises:
        RemoteError: It cannot be looked up.
    """
    from tidemill.deadletters.folder_reader import LetterFolder

    if isinstance(letters, LetterFolder):
        return letters.history()
    from tidemill.deadletters.redrive.history import read_history

    return read_history(settings, letters.ranges())


def redrive_identity(settings: Settings, where: str, criteria: Criteria) -> str:
    """Return what tells a redrive from others; see `core.redrive.identity`.

    The cursor of a folder is in it, so the folder may be moved.
    """
    if settings.dlq.path:
        return identity("", "files", where, criteria)
    return identity(settings.dlq_topic, settings.dlq_brokers, where, criteria)
