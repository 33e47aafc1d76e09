"""A sealed segment has the rows that it was given, sorted, whatever their columns have."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from tests.recorder.rows import batch_of, message, task

from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.sealing import seal

LABELS = st.lists(st.tuples(st.sampled_from("ab"), st.just("1")), max_size=2, unique_by=lambda label: label[0])
#: Columns of tasks that mostly have nothing, in all rows or in some.
TASKS = st.fixed_dictionaries(
    {},
    optional={
        "args": st.sampled_from([[], ["--fast"], [""], None]),
        "labels": st.one_of(st.none(), LABELS),
        "stdout": st.sampled_from([None, b"", b"text"]),
        "parent": st.sampled_from([None, "t"]),
        "slot": st.sampled_from([None, 0, 7]),
    },
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from([None, b"", b"k"]),
        "committed_at": st.sampled_from([None, 5]),
        "error": st.sampled_from([None, "exit: exit code #"]),
        "topic": st.sampled_from(["orders", "bills"]),
    },
)


def seal_batches(table: RowTable, batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    numbered = [
        (FrameInfo(f"e{seq % 2}", seq % 2, seq, table), batch_of(table, *rows)) for seq, rows in enumerate(batches)
    ]
    found = pq.read_table(pa.BufferReader(seal(table, numbered, "w").parquet)).to_pylist()
    return [{name: row[name] for name in batches[0][0] if name in row} for row in found]


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), TASKS), min_size=1, max_size=5), min_size=1, max_size=5))
def test_tasks(batches: list[list[tuple[int, dict[str, Any]]]]) -> None:
    rows = [[task("t-1", [offset], partition=offset % 2, **rest) for offset, rest in some] for some in batches]
    expected = [row for some in rows for row in some]
    expected.sort(key=lambda row: (row["partition"], row["offsets"]))
    assert seal_batches(RowTable.TASKS, rows) == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), MESSAGES), min_size=1, max_size=5), min_size=1, max_size=5))
def test_messages(batches: list[list[tuple[int, dict[str, Any]]]]) -> None:
    rows = [[message(offset, offset % 2, **rest) for offset, rest in some] for some in batches]
    expected = [row for some in rows for row in some]
    expected.sort(key=lambda row: (row["topic"], row["partition"], row["offset"]))
    assert seal_batches(RowTable.MESSAGES, rows) == expected


def test_large_batches_among_small_ones() -> None:
    rows = [
        [task(f"t-{n}", [n], args=[], labels=[]) for n in range(start, end)]
        for start, end in ((0, 3), (3, 2500), (2500, 2501))
    ]
    assert seal_batches(RowTable.TASKS, rows[::-1]) == [row for some in rows for row in some]
