"""What was beside the committed offset of a partition, as the previous reader left it."""

from __future__ import annotations

from typing import Final

import structlog

from tidemill.config.redaction import redact_text
from tidemill.core.streams.offset_metadata import decode_metadata
from tidemill.core.streams.redelivery_items import Commit
from tidemill.sources.base import TopicPartition

log = structlog.get_logger(__name__)

_SHOWN_CHARACTERS: Final = 100


class PastCommits:
    """Reads them, and says once per partition that one cannot be read."""

    def __init__(self) -> None:
        """Start with nothing said."""
        self._unreadable: set[TopicPartition] = set()

    def read(self, lane: TopicPartition, text: str) -> Commit[TopicPartition] | None:
        """Return the last commit of a partition; None if the text beside it is not ours."""
        past = decode_metadata(lane, text)
        if text and past is None and lane not in self._unreadable:
            self._unreadable.add(lane)
            topic, partition = lane
            log.warning(
                "the metadata of a committed offset cannot be read: all events from that offset on are redelivered, "
                "and their failures are counted from 0",
                topic=topic,
                partition=partition,
                note=redact_text(text)[:_SHOWN_CHARACTERS],
            )
        return past
