"""Exports recorded messages as Parquet files with the columns of the history, for Spark SQL and other readers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.recorder.format.file_layout import create_file, list_periods, list_worker_folders
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.row_search import READ_ERRORS
from tidemill.recorder.reading.segment_store import DiskStore, StoreCache

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns of the history by their names in recordings, where these differ.
_NAMES = {"arrived_at": "record_at", "started_at": "arranged_at", "finished_at": "resolved_at"}


def export_messages(
    db_dir: Path, target: Path, schema: pa.Schema, since_us: int, until_us: int, problems: list[str]
) -> int:
    """Write all messages resolved in a time range; returns their number.

    Args:
        db_dir: The folder of all recordings.
        target: The folder for the files; created if it is missing.
        schema: The schema of the history.
        since_us: The start of the range in UTC microseconds.
        until_us: The end of the range, exclusive.
        problems: Receives descriptions of data that cannot be read.

    Raises:
        OSError: The target cannot be written.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    count = 0
    for name, worker, rows in _read_all(db_dir, problems):
        at = pc.coalesce(rows["resolved_at"], 0)
        rows = rows.filter(pc.and_(pc.greater_equal(at, since_us), pc.less(at, until_us)))
        if not len(rows):
            continue
        table = _to_history(rows, worker, schema)
        # Spark ignores files whose names begin with an underscore.
        unfinished = target / f"_{name}"
        unfinished.unlink(missing_ok=True)
        fd = create_file(unfinished)
        try:
            with os.fdopen(fd, "wb") as file:
                pq.write_table(table, file, compression="zstd")
            unfinished.replace(target / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        count += len(table)
    return count


def _read_all(db_dir: Path, problems: list[str]) -> Iterator[tuple[str, str, pa.Table]]:
    """Yield the rows of each segment, with a name for their file and the worker's name."""
    cache = StoreCache()
    for folder in list_worker_folders(db_dir):
        for period in list_periods(folder):
            store = DiskStore(period, cache)
            worker = _find_worker(store, period.name.removesuffix(f"-{period.started}"))
            for segment in store.list_segments():
                if segment.table is not RowTable.MESSAGES:
                    continue
                parts: Iterable[pa.Table] = ()
                try:
                    if segment.sealed:
                        parts = [store.open_rows(segment).read(use_threads=False)]
                    else:
                        opened, problem = store.list_parts(segment)
                        parts = (part.read() for part in opened)
                        if problem:
                            problems.append(
                                f"{period.name}: {segment.stem} is damaged; its rest was skipped: {problem}"
                            )
                except FileNotFoundError:
                    continue
                except READ_ERRORS as error:
                    problems.append(f"{period.name}: {segment.stem} is damaged and was skipped: {error}")
                for number, part in enumerate(parts):
                    more = f"-{number}" if number else ""
                    yield f"part-{folder.name}-{period.name}-{segment.number:06d}{more}.parquet", worker, part


def _find_worker(store: DiskStore, otherwise: str) -> str:
    with contextlib.suppress(Exception), contextlib.closing(store.connect()) as db:
        found = db.execute("select worker from about").fetchone()
        return str(found[0]) if found else otherwise
    return otherwise


def _to_history(rows: pa.Table, worker: str, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = []
    for field in schema:
        if field.name == "worker":
            columns.append(pa.repeat(worker, len(rows)))
            continue
        column = rows[_NAMES.get(field.name, field.name)]
        if field.name == "finished_at":
            column = pc.coalesce(column, 0)
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)
