"""The state of an open message of a pipeline, as its driver reports it."""

from __future__ import annotations

import msgspec

from tidemill.core.pipeline.message_stage import MessageStage


class OpenMessage(msgspec.Struct, frozen=True):
    """A message that a pipeline has not finished.

    Attributes:
        topic: The message's topic.
        partition: The message's partition.
        offset: The message's offset.
        engine: The slot of the engine that owns the partition; None if no engine does.
        stage: The stage that the message is at.
        text: The same in words.
    """

    topic: str
    partition: int
    offset: int
    engine: int | None
    stage: MessageStage
    text: str
