"""The plan of a backfill, created once and stored, and the work that remains.

The folder of outcomes is the record of a backfill: `_backfill/plan.json` says what was requested and which offsets that
meant; the outcome files say which ranges are done. Readers of the folder skip names that start with `_`.

Invariants: a plan is written before anything is processed, and never changes; a folder holds one backfill; only one
process at a time works on it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka as ck
import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.ranges import (
    Offset,
    OffsetRange,
    PartitionEdge,
    PartitionSpan,
    Position,
    TimeBound,
    find_remaining,
    find_span,
    parse_position,
    split,
)
from tidemill.core.topic_identity import is_replaced
from tidemill.pipeline.reports.outcomes import find_finished_ranges
from tidemill.runtime.kafka.client import CALL_SECONDS, LibraryLog, describe_client_error
from tidemill.sources.ranges import make_reader_config
from tidemill.sources.topic_watch import open_topic_ids

log = structlog.get_logger(__name__)

PLAN_VERSION = 1
_PLAN_FOLDER = "_backfill"


class BackfillPlan(msgspec.Struct, frozen=True):
    """The plan of one backfill.

    Attributes:
        topic: The source topic.
        start: The start position, as the user wrote it.
        end: The end position, as the user wrote it.
        pieces: The ranges to process, in order.
        deleted: How many requested offsets the broker had already deleted.
        made_at: When the plan was created, in ISO 8601, UTC.
        topic_id: The topic's id at that time; None if unknown.
        version: The version of this format.
    """

    topic: str
    start: str
    end: str
    pieces: list[OffsetRange]
    deleted: int
    made_at: str
    topic_id: str | None = None
    version: int = PLAN_VERSION

    @property
    def total(self) -> int:
        """The total number of offsets."""
        return sum(piece.size for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether no partition is split."""
        return len({piece.partition for piece in self.pieces}) == len(self.pieces)


def refuse_unordered(settings: Settings, *, whole: bool) -> None:
    """Reject `executor.order_by: key` if ranges of one partition would run in parallel.

    Args:
        settings: The settings of the run.
        whole: Whether no partition is split.

    Raises:
        ConfigError: Partitions are split, and the settings require order.
    """
    if settings.executor.order_by == "key" and not whole:
        raise ConfigError(
            "executor.order_by is key, but this backfill splits partitions into ranges that run in parallel; use "
            "--whole-partitions (whole_partitions=True) with a new outcomes folder, or set executor.order_by to none"
        )


class BackfillFolder:
    """The folder of a backfill.

    Args:
        path: The folder for outcomes; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plan_path = path / _PLAN_FOLDER / "plan.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder for a block.

        Raises:
            ConfigError: Another process holds the lock, or the folder cannot be created.
        """
        path = self.path / _PLAN_FOLDER / "lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot use the outcomes folder {self.path}: {error.strerror}; use another one"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ConfigError(
                f"another process is running the backfill in {self.path}; wait for it, or use another folder"
            ) from None
        finally:
            os.close(fd)

    def load(self, topic: str, start: str, end: str) -> BackfillPlan | None:
        """Return the stored plan; None if there is none.

        Raises:
            ConfigError: The plan belongs to another backfill, or cannot be read.
        """
        try:
            plan = msgspec.json.decode(self._plan_path.read_bytes(), type=BackfillPlan)
        except FileNotFoundError:
            self._refuse_other_files()
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{self._plan_path} cannot be read: {error}; use another folder") from error
        asked = (topic, start, end)
        if (plan.topic, plan.start, plan.end) != asked:
            raise ConfigError(
                f"{self.path} holds the backfill of topic {plan.topic!r} from {plan.start} to {plan.end}, not of "
                f"{topic!r} from {start} to {end}; use another folder, or the same topic and positions to resume it"
            )
        return plan

    def _refuse_other_files(self) -> None:
        strange = next((entry.name for entry in self.path.iterdir() if entry.name != _PLAN_FOLDER), None)
        if strange is not None:
            raise ConfigError(f"{self.path} contains other files ({strange}); use an empty or a new folder")

    def save(self, plan: BackfillPlan) -> None:
        """Write the plan atomically."""
        unfinished = self._plan_path.with_suffix(".new")
        with open(unfinished, "wb") as file:
            file.write(msgspec.json.encode(plan))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._plan_path)

    def find_left(self, plan: BackfillPlan) -> list[OffsetRange]:
        """Return the remaining ranges, in order."""
        return find_remaining(plan.pieces, find_finished_ranges(entry.name for entry in self.path.iterdir()))

    def tidy(self) -> None:
        """Remove incomplete files that killed engines left."""
        for leftover in self.path.glob("_part-*"):
            leftover.unlink(missing_ok=True)


def look_up(settings: Settings, start: Position, end: Position) -> list[PartitionSpan]:
    """Return the offsets between two positions in each partition of the source topic.

    Raises:
        RemoteError: The brokers do not respond.
    """
    topic = settings.kafka.source_topic
    consumer = ck.Consumer(make_reader_config(settings.kafka), logger=LibraryLog())
    try:
        numbers = sorted(consumer.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions)
        edges = {
            number: consumer.get_watermark_offsets(ck.TopicPartition(topic, number), timeout=CALL_SECONDS)
            for number in numbers
        }
        first = _resolve(consumer, topic, start, edges)
        last = _resolve(consumer, topic, end, edges)
    except ck.KafkaException as error:
        raise RemoteError(
            f"cannot look up the offsets of topic {topic!r} at {settings.kafka.brokers}: {describe_client_error(error)}"
        ) from error
    finally:
        consumer.close()
    return [find_span(number, first[number], last[number], *edges[number]) for number in numbers]


def _resolve(
    consumer: ck.Consumer, topic: str, position: Position, edges: dict[int, tuple[int, int]]
) -> dict[int, int]:
    """Return the offset of a position in each partition."""
    match position:
        case PartitionEdge.EARLIEST:
            return {number: low for number, (low, _) in edges.items()}
        case PartitionEdge.LATEST:
            return {number: high for number, (_, high) in edges.items()}
        case Offset(value):
            return dict.fromkeys(edges, value)
        case TimeBound(milliseconds):
            asked = [ck.TopicPartition(topic, number, milliseconds) for number in edges]
            found = consumer.offsets_for_times(asked, timeout=CALL_SECONDS)
            # Kafka has no offset for a time after the last message; use the end of the partition.
            return {at.partition: at.offset if at.offset >= 0 else edges[at.partition][1] for at in found}


def check_still_there(settings: Settings, left: list[OffsetRange], topic_id: str | None = None) -> None:
    """Refuse to resume if the topic was recreated in the meantime.

    Raises:
        RemoteError: The topic was recreated, it ends before the planned ranges, or the brokers do not respond.
    """
    if is_replaced(topic_id, open_topic_ids(settings.kafka).ask(CALL_SECONDS)):
        raise RemoteError(
            f"topic {settings.kafka.source_topic!r} was recreated after the backfill was planned; start over with "
            "another outcomes folder",
            retryable=False,
        )
    ends = {
        span.range.partition: span.range.end for span in look_up(settings, PartitionEdge.EARLIEST, PartitionEdge.LATEST)
    }
    for piece in left:
        if ends.get(piece.partition, -1) < piece.end:
            raise RemoteError(
                f"{settings.kafka.source_topic}/{piece.partition} ends before the planned offset {piece.end}: the "
                "topic was recreated; start over with another outcomes folder",
                retryable=False,
            )


def format_now() -> str:
    """Return the current time in ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def make_plan(
    settings: Settings, start: str, end: str, choose_size: Callable[[int], int], *, whole: bool
) -> BackfillPlan:
    """Return the plan of a backfill of the source topic as it is now, and log requested offsets that do not exist.

    Args:
        settings: The settings of the run.
        start: The start position, as the user wrote it.
        end: The end position, as the user wrote it.
        choose_size: Returns the maximum size of a range for a total number of messages.
        whole: Whether to leave partitions unsplit.
    """
    topic = settings.kafka.source_topic
    # Read the id first: if the topic is recreated after this, reading the ranges detects it.
    topic_id = open_topic_ids(settings.kafka).ask(CALL_SECONDS)
    spans = look_up(settings, parse_position(start, "the start (--from)"), parse_position(end, "the end (--to)"))
    for span in spans:
        where = f"{topic}/{span.range.partition}"
        if span.deleted:
            log.warning(
                "messages were deleted by the broker before they could be read", partition=where, gap=span.deleted
            )
        if span.beyond:
            log.info("the partition ends before the requested end", partition=where, missing=span.beyond)
    ranges = [span.range for span in spans if span.range.size]
    pieces = sorted(ranges) if whole else split(ranges, choose_size(sum(part.size for part in ranges)))
    return BackfillPlan(topic, start, end, pieces, sum(span.deleted for span in spans), format_now(), topic_id)
