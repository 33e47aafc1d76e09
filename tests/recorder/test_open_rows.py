"""What a reader keeps of open segments, and which rows match by labels and offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recorder.rows import batch_of, message, task

from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.schema import RowTable, encode_rows
from tidemill.recorder.reading.open_rows import MAX_SMALL_PARTS, OpenPart, OpenRows
from tidemill.recorder.reading.row_filter import RowCriteria, match_rows
from tidemill.recorder.writing.open_segment import OpenSegment
from tidemill.recorder.writing.sealing import join_batches

LABELS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("12")), max_size=3, unique_by=lambda label: label[0]
)


def write(segment: OpenSegment, seq: int, *rows: dict[str, Any]) -> None:
    batch = batch_of(RowTable.MESSAGES, *rows)
    segment.append([(FrameInfo("e", 0, seq, RowTable.MESSAGES), encode_rows(batch), batch)])


def list_offsets(parts: list[OpenPart]) -> list[int]:
    return [offset for part in parts for offset in part.read(["offset"])["offset"].to_pylist()]


def test_an_open_segment_is_read_on_in_parts_that_stay_few(tmp_path: Path) -> None:
    segment, opened = OpenSegment(tmp_path / "rows.open"), OpenRows()
    for seq in range(5 * MAX_SMALL_PARTS):
        write(segment, seq, message(2 * seq), message(2 * seq + 1, topic=f"topic-{seq % 3}"))
        parts, problem = opened.read_on(RowTable.MESSAGES, memoryview(segment.path.read_bytes()))
        assert (sorted(list_offsets(parts)), problem) == (list(range(2 * seq + 2)), "")
        assert len(parts) <= MAX_SMALL_PARTS
        assert sum(part.summary.rows for part in parts) == 2 * seq + 2
    segment.close()


def test_a_part_returns_what_it_was_given() -> None:
    rows = [message(1), message(2, key=None, error="exit: exit code #", status="failed"), message(3, topic="payments")]
    joined = join_batches(
        RowTable.MESSAGES, [(FrameInfo("e", 3, 1, RowTable.MESSAGES), batch_of(RowTable.MESSAGES, *rows))]
    )
    part = OpenPart(RowTable.MESSAGES, joined)
    assert part.read().to_pylist() == [row | {"engine_id": "e", "engine": 3} for row in rows]
    assert part.read(["status", "offset"]).to_pylist() == [
        {"status": row["status"], "offset": row["offset"]} for row in rows
    ]
    assert part.summary.kinds == {"done": 2, "failed": 1}


def test_a_file_that_was_removed_is_still_read_to_be_sealed(tmp_path: Path) -> None:
    segment = OpenSegment(tmp_path / "rows.open")
    write(segment, 1, message(1), message(2))
    segment.path.unlink()
    ((info, batch),) = segment.read_batches(RowTable.MESSAGES)
    assert (info.seq, batch["offset"].to_pylist()) == (1, [1, 2])
    segment.close()


def test_a_file_that_somebody_damaged_is_refused_by_the_disk(tmp_path: Path) -> None:
    segment = OpenSegment(tmp_path / "rows.open")
    write(segment, 1, message(1))
    data = segment.path.read_bytes()
    segment.path.write_bytes(data[:-5] + b"wrong")
    with pytest.raises(OSError, match="damaged"):
        list(segment.read_batches(RowTable.MESSAGES))
    segment.path.write_bytes(data[:-5])
    with pytest.raises(OSError, match="truncated"):
        list(segment.read_batches(RowTable.MESSAGES))
    segment.close()


@given(st.lists(st.one_of(st.none(), LABELS), max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_labels_match_as_if_each_task_were_looked_at(labels: list[Any], start: int, size: int) -> None:
    rows = [task(f"t-{n}", [n], labels=own) for n, own in enumerate(labels)]
    table = pa.Table.from_batches([batch_of(RowTable.TASKS, *rows)])[start : start + size]
    twice = pa.concat_tables([table, table])
    mask = match_rows(twice, RowCriteria(table=RowTable.TASKS, label=("a", "1")))
    expected = [("a", "1") in (own or []) for own in labels[start : start + size]]
    assert pc.fill_null(mask, False).to_pylist() == expected * 2
