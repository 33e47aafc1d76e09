"""The history of an engine: one row per finished message, in Parquet parts that Spark SQL can read while they grow.

A report, not a ledger: rows that are not written when the engine is killed are lost, and a reprocessed message has one
row per time.

Invariants: `add` never waits, and never raises because of the disk. The name of a part starts with `_` until the part
is complete; readers skip such names. Every part has `SCHEMA`. Failed writes are logged at a limited rate, hold at most
`KEPT_PARTS` parts of rows in memory, and never stop the pipeline. pyarrow is loaded only with the first part.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.pipeline.handler.models import ExecutorError
from tidemill.pipeline.reports.columns import convert_timestamps
from tidemill.pipeline.reports.parts import LONGS, Part, join_parts, pack_words
from tidemill.pipeline.reports.report import FinishedBatch
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.engine_tasks import EngineTasks

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger(__name__)

#: A part is closed at this many rows or seconds, whichever comes first.
MAX_ROWS = 50_000
MAX_AGE_SECONDS = 60.0
#: The number of columns that differ between rows; the columns after them are constant per engine.
_OWN_COLUMNS = 11
#: Columns with few distinct values; dictionary encoding of the others takes longer than writing them.
WORDS = ["topic", "partition", "status", "tasks", "attempts", "error", "worker", "engine", "engine_id"]
#: Numbers that differ little between rows.
ENCODINGS = dict.fromkeys(("offset", "arrived_at", "started_at", "finished_at"), "DELTA_BINARY_PACKED")
#: How many parts of rows are held while the disk fails; older rows are dropped and counted.
KEPT_PARTS = 4
MAX_ERROR_CHARS = 4096
LOG_SECONDS = 60.0


def __getattr__(name: str) -> Any:
    if name == "SCHEMA":  # computed lazily, because pyarrow takes time and memory to load
        return _build_schema()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class HistoryBlock:
    """The rows of one batch, packed: column parts by name; see `FinishedBatch.parts`."""

    parts: dict[str, Part]
    size: int

    def __len__(self) -> int:
        return self.size


class HistoryRows:
    """Rows of the history, packed or as Arrow columns; as Python objects they would take ten times as much memory.

    Args:
        blocks: Packed rows, or tables with the columns of `SCHEMA` up to `error`, in its order; word columns may be
            dictionary-encoded.
    """

    __slots__ = ("_blocks", "count")

    def __init__(self, blocks: Sequence[HistoryBlock | pa.Table] = ()) -> None:
        self._blocks = [block for block in blocks if len(block)]
        self.count = sum(len(block) for block in self._blocks)

    @classmethod
    def from_columns(cls, columns: Sequence[Sequence[Any]]) -> HistoryRows:
        """Return rows from the columns of `SCHEMA` up to `error`, in its order and of equal length."""
        import pyarrow as pa

        fields = list(_build_schema())[:_OWN_COLUMNS]
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, fields, strict=True)]
        return cls([pa.Table.from_arrays(arrays, names=[field.name for field in fields])])

    def __len__(self) -> int:
        return self.count

    @property
    def offsets(self) -> list[int]:
        """The offset of each row."""
        return [offset for table in self._list_tables() for offset in table["offset"].to_pylist()]

    def extend(self, rows: HistoryRows) -> None:
        """Append rows."""
        self._blocks += rows._blocks
        self.count += rows.count

    def split_off(self, count: int) -> HistoryRows:
        """Remove and return the first rows."""
        first: list[HistoryBlock | pa.Table] = []
        left = min(count, self.count)
        while left:
            block = self._blocks.pop(0)
            if len(block) > left:
                (table,) = HistoryRows([block])._list_tables()
                self._blocks.insert(0, table[left:])
                block = table[:left]
            first.append(block)
            left -= len(block)
        found = HistoryRows(first)
        self.count -= found.count
        return found

    def select(self, wanted: Sequence[bool]) -> HistoryRows:
        """Return the rows for which `wanted` is true."""
        import pyarrow as pa

        parts, start = [], 0
        for table in self._list_tables():
            parts.append(table.filter(pa.array(wanted[start : start + len(table)], pa.bool_())))
            start += len(table)
        return HistoryRows(parts)

    def join(self, schema: pa.Schema) -> pa.Table:
        """Return all rows as one table with these column types."""
        import pyarrow as pa

        tables = self._list_tables()
        columns = []
        for field in schema:
            chunks = [chunk.cast(field.type) for table in tables for chunk in table[field.name].chunks]
            columns.append(pa.chunked_array(chunks, field.type).combine_chunks())
        return pa.Table.from_arrays(columns, schema=schema)

    def _list_tables(self) -> list[pa.Table]:
        tables: list[pa.Table] = []
        for is_packed, group in itertools.groupby(self._blocks, lambda block: isinstance(block, HistoryBlock)):
            blocks = list(group)
            tables += [_unpack(blocks)] if is_packed else blocks
        return tables


def _unpack(blocks: Sequence[HistoryBlock]) -> pa.Table:
    """Return packed rows as a table."""
    import pyarrow as pa
    import pyarrow.compute as pc

    word, count, long = pa.dictionary(pa.int32(), pa.string()), pa.int32(), pa.int64()

    def join(name: str, kind: pa.DataType) -> pa.Array:
        return join_parts([block.parts[name] for block in blocks], kind)

    return pa.table(
        {
            "topic": join("topic", word),
            "partition": join("partition", count),
            "offset": join("offset", long),
            "key": join("key", pa.binary()),
            "status": join("status", word),
            "tasks": join("tasks", count),
            "attempts": join("attempts", count),
            "arrived_at": convert_timestamps(join("record_at", long)),
            "started_at": join("started_at", long),
            "finished_at": pc.divide(join("resolved_at", long), 1000),
            "error": join("error", word),
        }
    )


class HistoryWriter:
    """Collects rows on the loop and writes them on a thread.

    Args:
        path: The folder; created if it is missing.
        identity: The engine's identity, which every row contains.
        max_rows: The maximum number of rows per part.
        max_age_seconds: The maximum age of the first row of a part.
    """

    needs_messages = False

    def __init__(
        self,
        path: Path,
        identity: EngineIdentity,
        max_rows: int = MAX_ROWS,
        max_age_seconds: float = MAX_AGE_SECONDS,
    ) -> None:
        self._path = path
        self._identity = identity
        self._max_rows = max_rows
        self._max_age_seconds = max_age_seconds
        self._rows = HistoryRows()
        self._parts = 0
        self._timer: asyncio.TimerHandle | None = None
        #: Runs its writes; an engine sets its own.
        self.tasks = EngineTasks()
        self._writing: asyncio.Task[None] | None = None
        self._refused = False
        #: Rows that were dropped because the disk kept failing, or because they do not fit the schema.
        self.dropped = 0

    def take(self, batch: FinishedBatch) -> None:
        """Add the rows of messages that left the pipeline."""
        try:
            self.add(make_rows(batch))
        except Exception as error:
            self._drop(len(batch), error)

    def add(self, rows: HistoryRows) -> None:
        self._rows.extend(rows)
        if self._timer is None and self._writing is None:
            self._arm()
        if len(self._rows) >= self._max_rows and self._writing is None and not self._refused:
            self._start()

    async def close(self) -> None:
        """Write the remaining rows; if the disk fails now, they are lost."""
        if self._writing is not None:
            await self._writing
        if self._rows:
            self._start()
            assert self._writing is not None
            await self._writing
        self._disarm()
        if self._rows:
            self._drop(len(self._rows), None)
            self._rows = HistoryRows()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._max_age_seconds, self._start)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._disarm()
        if self._writing is None:
            self._writing = self.tasks.run("the history", self._write())

    async def _write(self) -> None:
        try:
            while self._rows:
                rows = self._rows.split_off(self._max_rows)
                self._refused = not await self._write_rows(rows)
                if self._refused or len(self._rows) < self._max_rows:
                    break
        finally:
            self._writing = None
            if self._rows:
                self._arm()

    async def _write_rows(self, rows: HistoryRows) -> bool:
        """Write one part; return whether its rows are settled, that is, written or lost."""
        self._parts += 1
        name = f"part-{self._identity.engine_id}-{self._parts:06d}.parquet"
        try:
            await asyncio.to_thread(_write_part, self._path, name, rows, self._identity)
        except OSError as error:
            rows.extend(self._rows)
            self._rows = rows
            excess = len(rows) - KEPT_PARTS * self._max_rows
            if excess > 0:
                rows.split_off(excess)
                self._drop(excess, error)
            throttle(log, LOG_SECONDS).error(
                "the history cannot be written; retrying", path=str(self._path), error=str(error), rows=len(self._rows)
            )
            return False
        except Exception as error:  # the rows do not fit any part; a retry would block all others
            self._drop(len(rows), error)
        return True

    def _drop(self, count: int, error: Exception | None) -> None:
        self.dropped += count
        throttle(log, LOG_SECONDS).error(
            "history rows are lost", path=str(self._path), error=str(error or ""), dropped=self.dropped
        )


def make_rows(batch: FinishedBatch) -> HistoryRows:
    """Return the rows of messages that left the pipeline."""
    errors = batch.rejected
    if batch.failed:
        errors = list(errors)
        for index, run in batch.failed.items():
            if run.error is not None:
                errors[index] = _describe(run.error)
    if errors.count(None) < len(errors):
        errors = [_clip(error) for error in errors]
    started_at = LONGS.spread([stretch.window.started_at for stretch in batch.stretches], batch.sizes)
    parts = {**batch.parts, "started_at": started_at, "error": pack_words(errors)}
    return HistoryRows([HistoryBlock(parts, len(batch))])


def _clip(error: str | None) -> str | None:
    return None if error is None else error[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()


def _describe(error: ExecutorError) -> str:
    return f"{error.kind}: {error.exception or f'exit code {error.exit_code}'}"


@functools.cache
def _build_schema() -> Any:
    import pyarrow as pa

    moment = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [
            pa.field("topic", pa.string(), nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("key", pa.binary()),
            pa.field("status", pa.string(), nullable=False),
            pa.field("tasks", pa.int32(), nullable=False),
            pa.field("attempts", pa.int32(), nullable=False),
            pa.field("arrived_at", moment),
            pa.field("started_at", moment),
            pa.field("finished_at", moment, nullable=False),
            pa.field("error", pa.string()),
            pa.field("worker", pa.string(), nullable=False),
            pa.field("engine", pa.int32(), nullable=False),
            pa.field("engine_id", pa.string(), nullable=False),
        ]
    )


def make_table(rows: HistoryRows, identity: EngineIdentity) -> Any:
    """Return rows as an Arrow table of `SCHEMA`."""
    import pyarrow as pa

    schema = _build_schema()
    table = rows.join(pa.schema(list(schema)[:_OWN_COLUMNS]))
    constants = [
        pa.repeat(pa.scalar(value, field.type), len(rows))
        for value, field in zip(_list_constants(identity), list(schema)[_OWN_COLUMNS:], strict=True)
    ]
    return pa.Table.from_arrays([*table.columns, *constants], schema=schema)


def _write_part(path: Path, name: str, rows: HistoryRows, identity: EngineIdentity) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f"_{name}"
    try:
        table = make_table(rows, identity)
        pq.write_table(table, unfinished, compression="zstd", use_dictionary=WORDS, column_encoding=ENCODINGS)
        unfinished.replace(path / name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        table = None
        # Otherwise Arrow would hold this thread's memory, up to 40 MB, until the next part in about a minute.
        pa.default_memory_pool().release_unused()


def _list_constants(identity: EngineIdentity) -> tuple[str, int, str]:
    return identity.worker, identity.slot, identity.engine_id
