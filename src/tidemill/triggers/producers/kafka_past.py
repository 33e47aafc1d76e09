"""The state that the previous reader of a partition committed together with the offset."""

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
    """Decodes the metadata of committed offsets, and warns once per partition if it cannot."""

    def __init__(self) -> None:
        self._unreadable: set[TopicPartition] = set()

    def read(self, lane: TopicPartition, text: str) -> Commit[TopicPartition] | None:
        """Return the last commit of a partition; None if the metadata was not written by this program."""
        past = decode_metadata(lane, text)
        if text and past is None and lane not in self._unreadable:
            self._unreadable.add(lane)
            topic, partition = lane
            log.warning(
                "cannot read the metadata of a committed offset; all events from that offset on are redelivered, and "
                "their failure counts restart at 0",
                topic=topic,
                partition=partition,
                note=redact_text(text)[:_SHOWN_CHARACTERS],
            )
        return past
