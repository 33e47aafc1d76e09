"""Rows of tasks, packed in blocks and joined, say what each of them said by itself."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tidemill.pipeline.recording.task_columns import MAX_OFFSETS, OK, TaskRow, join_tasks, pack_tasks

ENDED_AT = 1_700_000_000_000_000
NO_STREAMS = (None, None, None)


def make_row(number: int, rng: random.Random) -> TaskRow:
    is_known = rng.random() < 0.1
    extras = (
        rng.choice([OK, "exit", "timeout"]),
        rng.choice([None, "parent"]),
        rng.choice([NO_STREAMS, (b"out", b"", None)]),
        rng.choice([None, "why"]),
    )
    details = (
        rng.choice([[], ["--fast", "ü"]]),
        rng.choice([[], [("name", "value")]]),
        rng.choice([0, None, -9, 2**40]),
        None if rng.random() < 0.8 else extras,
    )
    return (
        rng.choice([f"task {number}", "ü", "x" * 300]),
        (rng.choice(["t", "ü"]), rng.randrange(3)),
        list(range(number, number + rng.choice([0, 1, 1, 1, 3, MAX_OFFSETS + 1]))),
        rng.choice([None, 3]),
        None if is_known or rng.random() < 0.1 else rng.randrange(1, 9_999),
        ENDED_AT + number,
        rng.random(),
        None if is_known else rng.random(),
        1 + number % 3,
        number,
        2 * number,
        None if rng.random() < 0.4 else details,
    )


def describe(row: TaskRow) -> dict[str, Any]:
    task_id, place, offsets, slot, pid, ended_at, waited, seconds, attempt, input_bytes, output_bytes, details = row
    args, labels, code, extras = details or ([], [], 0, None)
    kind, parent, (stdout, stderr, stdin), error = extras or (OK, None, NO_STREAMS, None)
    was_started = pid is not None or seconds is None
    return {
        "task_id": task_id,
        "topic": place[0],
        "partition": place[1],
        "offsets": list(offsets[:MAX_OFFSETS]),
        "args": args,
        "labels": labels,
        "slot": slot,
        "pid": pid,
        "queued_at": ended_at - int(waited * 1e6),
        "started_at": ended_at - int((seconds or 0.0) * 1e6) if was_started else None,
        "ended_at": ended_at,
        "exit_code": None if code == 2**40 else code,
        "kind": kind,
        "attempt": attempt,
        "input_bytes": input_bytes,
        "output_bytes": output_bytes,
        "parent": parent,
        "stdout": stdout,
        "stderr": stderr,
        "error": error,
        "stdin": stdin,
    }


@pytest.mark.parametrize("seed", range(20))
def test_rows_stay_what_they_were_however_they_are_divided_into_blocks(seed: int) -> None:
    rng = random.Random(seed)
    rows = [make_row(number, rng) for number in range(rng.randrange(1, 30))]
    cuts = [0, *sorted(rng.sample(range(1, len(rows)), min(3, len(rows) - 1))), len(rows)]
    joined = join_tasks([pack_tasks(rows[start:end]) for start, end in itertools.pairwise(cuts)])
    joined.validate(full=True)
    assert joined.to_pylist() == [describe(row) for row in rows]
