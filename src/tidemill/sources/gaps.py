"""Distinguishes gaps left by retention from holes left by compaction and transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import confluent_kafka as ck
import structlog

from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import TopicPartition
from tidemill.sources.buffer import Buffer

log = structlog.get_logger(__name__)


def note_jump(buffer: Buffer, offset: int) -> None:
    """Record a jump of a partition's offsets; `count_deleted` checks later whether messages were deleted."""
    if buffer.expected < 0:
        return
    if offset > buffer.expected:
        buffer.holes.append((buffer.expected, offset))
        return
    log.warning(
        "the topic ends before the committed offset; reading it again from its beginning",
        partition=buffer.name,
        committed=buffer.expected,
        first=offset,
    )


def count_deleted(
    consumer: ck.Consumer, topic: str, partition: int, holes: Sequence[tuple[int, int]], timeout_seconds: float
) -> int | None:
    """Return how many messages the broker deleted before they were read; each gap is logged.

    Args:
        consumer: Sends the request.
        topic: The topic.
        partition: The partition.
        holes: The expected and the actual offset of each jump.
        timeout_seconds: How long to wait for the brokers.

    Returns:
        The number of messages; None if the brokers do not answer: ask again later.
    """
    name = f"{topic}/{partition}"
    try:
        low, _ = consumer.get_watermark_offsets(ck.TopicPartition(topic, partition), timeout=timeout_seconds)
    except ck.KafkaException as error:
        throttle(log, 60.0).warning(
            "offsets are missing, and the brokers do not answer whether messages were deleted; asking again",
            partition=name,
            error=str(error),
        )
        return None
    deleted = 0
    for expected, first in holes:
        if low > expected:
            gap = min(low, first) - expected
            deleted += gap
            log.error(
                "the broker deleted messages before they were read; raise the topic's retention",
                partition=name,
                expected=expected,
                first=first,
                gap=gap,
            )
    return deleted


def examine_holes(consumer: ck.Consumer, buffers: Mapping[TopicPartition, Buffer]) -> int:
    """Return how many messages were deleted in the unexamined jumps."""
    found = 0
    for (topic, partition), buffer in list(buffers.items()):
        if buffer.holes:
            deleted = count_deleted(consumer, topic, partition, buffer.holes, 1.0)
            if deleted is not None:
                buffer.holes = []
                found += deleted
    return found
