"""History parts as other programs read them: complete, of one schema, and never in the pipeline's way."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pipeline.batches import make_batch
from tests.until import until

from tidemill.pipeline.handler.models import ErrorKind, ExecutorError, ExecutorTask
from tidemill.pipeline.reports import history
from tidemill.pipeline.reports.history import HistoryRows, HistoryWriter
from tidemill.pipeline.reports.report import NO_WINDOW, HistoryStatus, WindowTimes
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage

IDENTITY = EngineIdentity(worker="w1", slot=2, engine_id="e" * 32, group="g")
MOMENT = 1_700_000_000_123_456


def add(writer: HistoryWriter, offset: int, **changed: Any) -> None:
    row: dict[str, Any] = {
        "topic": "t",
        "partition": 1,
        "offset": offset,
        "key": b"k\xff",
        "status": HistoryStatus.DONE,
        "tasks": 1,
        "attempts": 2,
        "arrived_at": MOMENT,
        "started_at": MOMENT + 1,
        "finished_at": MOMENT + 2,
        "error": None,
    }
    writer.add(HistoryRows.from_columns([[value] for value in (row | changed).values()]))


def parts(path: Path) -> list[Path]:
    return sorted(path.glob("part-*.parquet"))


def read(path: Path) -> list[dict[str, Any]]:
    return [row for part in parts(path) for row in pq.read_table(part).to_pylist()]


async def test_rows_come_back_with_types_zone_and_names(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "deep" / "history", IDENTITY)
    add(writer, 7)
    add(writer, 8, key=None, started_at=None, arrived_at=None, status=HistoryStatus.FAILED, error="exit: why")
    await writer.close()
    (part,) = parts(tmp_path / "deep" / "history")
    table = pq.read_table(part)
    assert table.schema.equals(history.SCHEMA)
    assert table.schema.field("finished_at").type == pa.timestamp("us", tz="UTC")
    first, second = table.to_pylist()
    start = datetime.datetime.fromtimestamp(MOMENT // 1_000_000, datetime.UTC)
    assert first == {
        "topic": "t",
        "partition": 1,
        "offset": 7,
        "key": b"k\xff",
        "status": "done",
        "tasks": 1,
        "attempts": 2,
        "arrived_at": start.replace(microsecond=123_456),
        "started_at": start.replace(microsecond=123_457),
        "finished_at": start.replace(microsecond=123_458),
        "error": None,
        "worker": "w1",
        "engine": 2,
        "engine_id": "e" * 32,
    }
    assert (second["key"], second["arrived_at"], second["started_at"]) == (None, None, None)
    assert (second["status"], second["error"]) == ("failed", "exit: why")


async def test_a_part_is_closed_when_it_is_full(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY, max_rows=100)
    for offset in range(350):
        add(writer, offset)
    await until(lambda: len(parts(tmp_path)) == 3, what="three parts are written")
    await writer.close()
    assert [pq.read_metadata(part).num_rows for part in parts(tmp_path)] == [100, 100, 100, 50]
    assert [row["offset"] for row in read(tmp_path)] == list(range(350))


async def test_a_part_is_closed_when_its_first_row_is_old_and_the_next_one_too(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY, max_age_seconds=0.05)
    for offset in range(2):
        add(writer, offset)
        await until(lambda: len(parts(tmp_path)) == offset + 1, what="the part is written")  # noqa: B023
    await writer.close()
    assert len(parts(tmp_path)) == 2


async def test_nothing_is_written_for_no_rows(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "history", IDENTITY)
    await writer.close()
    assert not (tmp_path / "history").exists()


async def test_readers_of_the_growing_folder_never_see_an_unfinished_part(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY, max_rows=200)

    def complete(count: int) -> bool:
        sizes = [pq.read_metadata(part).num_rows for part in parts(tmp_path)]
        assert sizes == [200] * len(sizes)
        return len(sizes) == count

    for number in range(20):
        for offset in range(200):
            add(writer, number * 200 + offset)
        await until(lambda: complete(number + 1), what="the part shows")  # noqa: B023
    await writer.close()
    assert not list(tmp_path.glob("_*"))
    assert [row["offset"] for row in read(tmp_path)] == list(range(4000))


async def test_a_disk_that_refuses_keeps_rows_until_it_accepts_them(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("in the way")
    writer = HistoryWriter(path, IDENTITY, max_rows=10, max_age_seconds=0.05)
    for offset in range(25):
        add(writer, offset)
    await until(lambda: writer._refused, what="the first try failed")
    path.unlink()
    await until(lambda: len(parts(path)) >= 2, what="it was tried again")
    await writer.close()
    assert sorted(row["offset"] for row in read(path)) == list(range(25))
    assert writer.dropped == 0


async def test_a_disk_that_continues_refusing_costs_rows_but_bounded_memory_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("in the way")
    writer = HistoryWriter(path, IDENTITY, max_rows=10, max_age_seconds=0.001)
    for offset in range(200):
        add(writer, offset)
    await until(lambda: writer.dropped >= 160, what="the oldest are dropped")
    await writer.close()
    assert writer.dropped == 200


async def test_rows_that_no_part_can_hold_are_counted_and_do_not_hold_up_the_others(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY, max_rows=2)
    for offsets in ((0, 2**70), (2,)):
        writer.take(make_batch([SourceMessage("t", 0, offset) for offset in offsets]))
    await writer.close()
    assert [row["offset"] for row in read(tmp_path)] == [2]
    assert writer.dropped == 2


class FakeRun:
    """What is reported of a task's run."""

    def __init__(self, attempts: int, error: ExecutorError | None = None, *, replaced: bool = False) -> None:
        self.attempts = attempts
        self.result = None
        self.ended_at = 0
        self.error = error
        self.replaced = replaced


@pytest.mark.parametrize(
    ("runs", "error", "status", "said"),
    [
        ([FakeRun(1), FakeRun(2)], None, "done", None),
        ([FakeRun(1), FakeRun(2, ExecutorError(ExecutorTask("x"), 3, "", None, 1, ErrorKind.EXIT))], None,
         "failed", "exit: exit code 3"),
        ([FakeRun(1, ExecutorError(ExecutorTask("x"), None, "", "no \ud800", None, ErrorKind.MISSING))], None,
         "failed", "missing: no ?"),
        ([FakeRun(1), FakeRun(2, ExecutorError(ExecutorTask("x"), 3, "", "why", 1, ErrorKind.EXIT), replaced=True)],
         None, "done", None),
        ([], "not JSON", "rejected", "not JSON"),
    ],
)  # fmt: skip
async def test_a_finished_message_is_reported_with_what_became_of_its_tasks(
    tmp_path: Path, runs: list[Any], error: str | None, status: str, said: str | None
) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY)
    message = SourceMessage("t", 0, 5, b"k", b"v", timestamp=1_700_000_000_123)
    window = WindowTimes(1, 1_700_000_001_500_000, 1_700_000_002_000_000) if runs else NO_WINDOW
    writer.take(make_batch([message], runs, window, error, time.time_ns()))
    await writer.close()
    (row,) = read(tmp_path)
    assert (row["status"], row["error"], row["tasks"]) == (status, said, len(runs))
    assert row["attempts"] == sum(run.attempts for run in runs)
    assert row["arrived_at"].timestamp() == 1_700_000_000.123
    assert (row["started_at"] is None) == (not runs)
    assert abs(row["finished_at"].timestamp() - time.time()) < 20


async def test_the_times_of_a_message_without_a_timestamp_are_unknown(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, IDENTITY)
    writer.take(make_batch([SourceMessage("t", 0, 5)]))
    await writer.close()
    assert read(tmp_path)[0]["arrived_at"] is None


def test_pyarrow_is_not_loaded_by_importing_history() -> None:
    code = "import sys, tidemill.pipeline.reports.history; print('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
