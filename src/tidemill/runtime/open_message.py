"""Where an open message of a pipeline is, as its driver tells it."""

from __future__ import annotations

import msgspec

from tidemill.core.pipeline.message_stage import MessageStage


class OpenMessage(msgspec.Struct, frozen=True):
    """A message that a pipeline has not finished.

    Attributes:
        topic: Its topic.
        partition: Its partition.
        offset: Its offset.
        engine: The slot of the engine that owns the partition; None: no engine does.
        stage: Where it is.
        text: The same in words.
    """

    topic: str
    partition: int
    offset: int
    engine: int | None
    stage: MessageStage
    text: str
