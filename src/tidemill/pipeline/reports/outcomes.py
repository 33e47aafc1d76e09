"""The outcomes of a bounded run: one row per message, in Parquet files that are published when they are final.

Invariants: a file whose name has no leading `_` is complete and has the history's schema. Its rows are of messages that
are done for good, so the file records that they need not be reprocessed. The letters of a part are published right
before its outcomes, which name them. Memory does not grow with the run. A failed write ends the run, because without
outcomes it could not be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tidemill.core.ranges import OffsetRange
from tidemill.deadletters.files import METADATA_KEY
from tidemill.pipeline.delivery.file_letters import FileDeadLetters
from tidemill.pipeline.reports.history import HistoryRows, make_rows, make_table
from tidemill.pipeline.reports.report import FinishedBatch, Report
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sources.base import TopicPartition

#: The number of rows per row group.
ROWS = 20_000

_RANGE_PART = re.compile(r"part-(\d+)-(\d+)-(\d+)\.parquet")


def name_range(part: OffsetRange) -> str:
    """Return the name of the outcome file of a range.

    Example:
        >>> name_range(OffsetRange(3, 0, 50))
        'part-00003-0000000000-0000000050.parquet'
    """
    return f"part-{part.partition:05d}-{part.start:010d}-{part.end:010d}.parquet"


def find_finished_ranges(names: Iterable[str]) -> list[OffsetRange]:
    """Return the ranges of these outcome files; other names are ignored."""
    found = [_RANGE_PART.fullmatch(name) for name in names]
    return [OffsetRange(int(match[1]), int(match[2]), int(match[3])) for match in found if match]


class OutcomeFile:
    """An unfinished outcome file; its methods block.

    Args:
        folder: The folder of the file.
        unfinished: Part of its name until it is complete.
        identity: The engine's identity, which every row contains.
    """

    def __init__(self, folder: Path, unfinished: str, identity: EngineIdentity) -> None:
        self._folder = folder
        self._path = folder / f"_{unfinished}-{identity.engine_id}"
        self._identity = identity
        self._writer: Any = None

    def write(self, rows: HistoryRows) -> None:
        import pyarrow.parquet as pq

        table = make_table(rows, self._identity)
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def publish(self, name: str, letters: str = "") -> None:
        """Complete the file and rename it; an existing file of that name is replaced.

        Args:
            name: The final name.
            letters: The name of its letters file; '' if there is none.
        """
        if self._writer is None:
            self.write(HistoryRows())
        if letters:
            self._writer.add_key_value_metadata({METADATA_KEY: letters.encode()})
        self._writer.close()
        self._path.replace(self._folder / name)

    def discard(self) -> None:
        """Remove the unfinished file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._path.unlink(missing_ok=True)


class _Part:
    """Waiting rows, and the file that they belong to."""

    __slots__ = ("file", "limit", "rows")

    def __init__(self, file: OutcomeFile) -> None:
        self.file = file
        self.rows = HistoryRows()
        self.limit = ROWS


class Outcomes:
    """The `Report` of a bounded engine.

    Args:
        folder: Where files are published.
        identity: The engine's identity, which every row contains.
        history: A second report for the messages, if any.
        name: The name of this engine's only file; None: one file per range.
        ranges: The ranges, by topic and partition, if each has a file.
        letters: The dead letters, if they are files; published together with the outcomes.
    """

    needs_messages = False

    def __init__(
        self,
        folder: Path,
        identity: EngineIdentity,
        history: Report | None = None,
        *,
        name: str | None = None,
        ranges: Mapping[TopicPartition, OffsetRange] | None = None,
        letters: FileDeadLetters | None = None,
    ) -> None:
        self.letters = letters
        self._history = history
        self._name = name
        self._ranges = dict(ranges or {})
        whole = _Part(OutcomeFile(folder, name, identity)) if name is not None else None
        self._whole = whole
        self._parts = {
            partition: whole or _Part(OutcomeFile(folder, name_range(part), identity))
            for partition, part in self._ranges.items()
        }
        self._tasks = EngineTasks()
        self._writing: asyncio.Task[None] | None = None
        #: Called with the first error of the disk.
        self.on_error: Callable[[Exception], None] = _ignore
        #: Whether the files of the finished part are published.
        self.published = False
        #: Whether every message is done, so that all outcomes are published; set before `close`.
        self.complete = False
        #: The committed offset of each partition; rows above it are not published.
        self.committed: Mapping[TopicPartition, int] = {}
        #: Whether outcomes of partly finished ranges are published, too.
        self.in_part = True
        #: The first error of the disk.
        self.error: Exception | None = None

    @property
    def tasks(self) -> EngineTasks:
        """Runs the writes of this object and of the history; an engine sets its own."""
        return self._tasks

    @tasks.setter
    def tasks(self, tasks: EngineTasks) -> None:
        self._tasks = tasks
        if self._history is not None:
            self._history.tasks = tasks
        if self.letters is not None:
            self.letters.tasks = tasks

    def take(self, batch: FinishedBatch) -> None:
        """Add the rows of messages that left the pipeline."""
        try:
            rows = make_rows(batch)
        except Exception as error:  # without these rows, nothing may be published
            self._failed(error)
            return
        if self._whole is not None:
            self._add(self._whole, rows, None)
        else:
            for topic_partition in dict.fromkeys(batch.topic_partitions):
                self._add(
                    self._parts[topic_partition],
                    rows.select([each == topic_partition for each in batch.topic_partitions]),
                    topic_partition,
                )
        if self._history is not None:
            self._history.take(batch)

    def _add(self, part: _Part, rows: HistoryRows, partition: TopicPartition | None) -> None:
        part.rows.extend(rows)
        if len(part.rows) >= part.limit and self._writing is None:
            self._writing = self._tasks.run("the outcomes", self._write(part, partition))

    async def close(self) -> None:
        """Publish the finished part, and discard the rest."""
        if self._writing is not None:
            # Shielded: a shutdown that times out does not cancel the current write.
            await asyncio.shield(self._writing)
        try:
            if self.error is None and (self.letters is None or self.letters.error is None):
                await asyncio.to_thread(self._publish)
                self.published = True
        except Exception as error:
            self._failed(error)
        await asyncio.to_thread(self._discard)
        if self._history is not None:
            await self._history.close()

    async def _write(self, part: _Part, partition: TopicPartition | None) -> None:
        """Write the final rows of a part; with ranges, rows above the committed offset wait."""
        rows = part.rows
        if partition is None:
            part.rows = HistoryRows()
        else:
            done = self.committed.get(partition, -1)
            part.rows = rows.select([offset >= done for offset in rows.offsets])
            rows = rows.select([offset < done for offset in rows.offsets])
        part.limit = len(part.rows) + ROWS
        try:
            if rows and self.error is None:
                await asyncio.to_thread(part.file.write, rows)
        except Exception as error:
            self._failed(error)
        finally:
            self._writing = None

    def _failed(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self.on_error(error)

    def _publish(self) -> None:
        if self._whole is not None and self._name is not None:
            if self.complete:
                self._publish_part(self._whole, self._name, self._whole.rows)
            return
        for partition, whole in self._ranges.items():
            end = whole.end if self.complete else self.committed.get(partition, whole.start)
            if end > whole.start and (self.complete or self.in_part):
                part = self._parts[partition]
                name = name_range(OffsetRange(whole.partition, whole.start, end))
                below = None if self.complete else end
                rows = part.rows.select([offset < end for offset in part.rows.offsets])
                self._publish_part(part, name, rows, partition, below)

    def _publish_part(
        self,
        part: _Part,
        name: str,
        rows: HistoryRows,
        partition: TopicPartition | None = None,
        below: int | None = None,
    ) -> None:
        if rows:
            part.file.write(rows)
        part.file.publish(name, self.letters.publish(name, partition, below) if self.letters is not None else "")

    def _discard(self) -> None:
        for part in [self._whole] if self._whole is not None else self._parts.values():
            part.file.discard()
        if self.letters is not None:
            self.letters.discard()


def _ignore(error: Exception) -> None:
    pass
