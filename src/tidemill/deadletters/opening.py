"""Opens dead letters for reading. Only this module decides, from the configuration, between a topic and files.

All calls block, so do not make them on event loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tidemill.config.settings import Settings

if TYPE_CHECKING:
    from tidemill.deadletters.folder_reader import FolderReader
    from tidemill.deadletters.reader import LetterReader

#: Dead letters, numbered by partition (each file counts as one) and offset; used in a `with` block.
Letters: TypeAlias = "LetterReader | FolderReader"


def open_letters(settings: Settings, group: str = "tidemill-dlq") -> Letters:
    """Return a pipeline's dead letters.

    Args:
        settings: The pipeline's settings.
        group: The consumer group whose committed offsets `LetterReader.read_committed` returns.
    """
    # Imported here, because one needs pyarrow and the other a Kafka client.
    if settings.dlq.path:
        from tidemill.deadletters.folder_reader import FolderReader

        return FolderReader(settings.dlq.path)
    from tidemill.deadletters.reader import LetterReader

    return LetterReader(settings, group)
