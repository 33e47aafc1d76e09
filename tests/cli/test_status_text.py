"""What a status line says, for a state and a width; and the summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.terminal.status_text import (
    LEAST_WIDTH,
    Part,
    count_cells,
    fit,
    format_backfill,
    format_seconds,
    format_status,
    format_summary,
)
from tidemill.runtime.link.progress import EngineProgress, SinkStats
from tidemill.spark.bounded.run import BoundedProgress
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress
from tidemill.spark.run_state import RunPhase, RunState

WORKING = RunState(RunPhase.RUNNING, 60.0, 65.0)


def pipeline(*engines: EngineProgress) -> PipelineProgress:
    statuses = [EngineStatus(slot, "running", progress=engine) for slot, engine in enumerate(engines)]
    return sum_progress((), engines, statuses)


BUSY = pipeline(
    EngineProgress(
        messages_done=1000,
        tasks_running=4,
        tasks_queued=7,
        partitions=["t/0", "t/1"],
        lag={"t/0": 5},
        in_flight=1012,
    ),
    EngineProgress(
        messages_done=234, tasks_running=3, tasks_failed=2, dead_lettered=2, letters_dropped=1, partitions=["t/2"]
    ),
)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (RunState(step="Spark is starting", step_seconds=3.2), "Spark is starting (3 s)"),
        (RunState(step="no broker at b:9092 yet", step_seconds=5.0), "no broker at b:9092 yet (5 s)"),
        (RunState(), "starting"),
        (RunState(RunPhase.RUNNING, 2.0), "the engines are starting (2 s)"),
        (RunState(RunPhase.STOPPING, step="Spark is stopping", step_seconds=1.0), "Spark is stopping (1 s)"),
    ],
)
def test_before_and_after_the_work_it_says_what_is_waited_for(state: RunState, text: str) -> None:
    assert format_status(state, sum_progress((), (), [EngineStatus(0, "starting")]), 0.0, 80) == text


def test_engines_are_summed_up() -> None:
    assert format_status(WORKING, BUSY, 99.6, 250) == (
        "2 of 2 engines, 3 partitions | 1,234 messages done, 100/s | tasks: 7 running, 7 queued, 2 failed | "
        "lag 5 (2 of 3 partitions not known yet), 1,012 in flight | 2 dead letters | 1 dead letter DROPPED"
    )


def test_one_of_something_is_in_the_singular() -> None:
    one = pipeline(EngineProgress(messages_done=1, partitions=["t/0"], lag={"t/0": 0}, in_flight=1))

    assert format_status(WORKING, one, 0.0, 250).startswith("1 of 1 engines, 1 partition | 1 message done, 0/s | ")
    draining = RunState(RunPhase.DRAINING, 1.0, 9.0, left_seconds=30.0)
    assert format_status(draining, one, 0.0, 80) == "draining, up to 30 s, 0 tasks left | 1 message in flight"


def test_with_less_room_the_less_important_goes_first() -> None:
    assert (
        format_status(WORKING, BUSY, 99.6, 79)
        == "2 of 2 engines | 1.2k done, 100/s | 7 running | lag 5 | 2 dead | 1 DROPPED"
    )
    assert format_status(WORKING, BUSY, 99.6, 60) == "1.2k done, 100/s | 7 running | lag 5 | 2 dead | 1 DROPPED"
    assert format_status(WORKING, BUSY, 99.6, 39) == "1.2k done, 100/s | lag 5 | 1 DROPPED"


def test_an_engine_that_is_down_stays_on_a_narrow_line() -> None:
    engines = [EngineStatus(0, "running", progress=EngineProgress()), EngineStatus(1, "waiting")]
    text = format_status(WORKING, sum_progress((), [EngineProgress()], engines), 0.0, 39)

    assert text == "1 of 2 engines | 0 done, 0/s | lag 0"


def test_a_drain_says_how_long_it_may_take_and_what_is_left() -> None:
    draining = RunState(RunPhase.DRAINING, 1.0, 9.0, left_seconds=29.6)
    now = pipeline(EngineProgress(tasks_running=8, tasks_queued=3, tasks_retrying=1, in_flight=1500))

    assert format_status(draining, now, 0.0, 80) == "draining, up to 30 s, 12 tasks left | 1,500 messages in flight"
    assert format_status(draining, now, 0.0, 39) == "draining, up to 30 s, 12 tasks left"


def test_a_lag_that_is_not_known_yet_is_said_to_be_that() -> None:
    unknown, known = EngineProgress(partitions=["t/0"], in_flight=3), EngineProgress(partitions=["t/0"], lag={"t/0": 7})

    assert "| lag not known yet, 3 in flight" in format_status(WORKING, pipeline(unknown), 0.0, 200)
    assert "| lag ?" in format_status(WORKING, pipeline(unknown), 0.0, 60)
    assert "| lag 7, 0 in flight" in format_status(WORKING, pipeline(known), 0.0, 200)


def test_what_is_waited_for_is_said_once_and_stays_on_a_narrow_line() -> None:
    waits = {"kafka": "no broker answers at any of the configured addresses\x1b[2J"}
    now = pipeline(EngineProgress(waits=waits), EngineProgress(waits=waits))

    wide, narrow = (format_status(WORKING, now, 0.0, width) for width in (250, 39))

    assert wide.count("waiting for kafka: no broker answers at any") == 1
    assert "\x1b" not in wide
    assert narrow == "0 done, 0/s | lag 0 | waiting for ka..."


@given(
    width=st.integers(LEAST_WIDTH, 250),
    done=st.integers(0, 10**12),
    tasks=st.integers(0, 10**6),
    why=st.text(max_size=60),
    phase=st.sampled_from(list(RunPhase)),
    total=st.integers(0, 10**9),
)
def test_every_line_fits_its_width(width: int, done: int, tasks: int, why: str, phase: RunPhase, total: int) -> None:
    state = RunState(phase, 3.0, step=f"waiting for {why}", step_seconds=3.0, left_seconds=30.0)
    engine = EngineProgress(
        messages_done=done,
        tasks_running=tasks,
        tasks_failed=tasks,
        in_flight=done,
        dead_lettered=tasks,
        letters_dropped=tasks,
        waits={"sinks.http.out": why},
        partitions=["t/0"],
    )
    backfill = BoundedProgress(total=total, passed=min(done, total), waits=engine.waits, dead_lettered=tasks)

    for text in (format_status(state, pipeline(engine), 1e6, width), format_backfill(state, backfill, 1e6, width)):
        assert 0 < count_cells(text) <= width
        assert text.isprintable()


def test_the_width_of_a_text_is_that_on_the_terminal() -> None:
    assert fit([Part(1, ("消息" * 10,))], 20) == "消息" * 4 + "..."


def test_a_backfill_has_a_bar_with_rate_and_time_left() -> None:
    now = BoundedProgress(total=10_000, passed=4_500, parts=12, parts_done=3, dead_lettered=2)

    assert format_backfill(WORKING, now, 1200.0, 120) == (
        "[#########...........] 45% | 4,500 of 10,000 messages | 1,200/s, 5 s left | 3 of 12 ranges | 2 dead letters"
    )
    assert format_backfill(WORKING, now, 1200.0, 39) == "45% | 4.5k of 10k | 1,200/s, 5 s left"
    assert "| the engines are starting (60 s) |" in format_backfill(WORKING, now, 0.0, 120)
    starting = RunState(step="Spark is starting", step_seconds=3.0)
    assert format_backfill(starting, BoundedProgress(), 0.0, 39) == "Spark is starting (3 s)"
    draining = RunState(RunPhase.DRAINING, left_seconds=3.0)
    assert format_backfill(draining, now, 0.0, 39).startswith("stopping | 45%")


def test_the_summary_has_messages_tasks_letters_and_sinks() -> None:
    engine = EngineProgress(
        messages_done=12_345,
        tasks_done=12_300,
        tasks_failed=45,
        tasks_retried=7,
        dead_lettered=45,
        letter_kinds={"task": 40, "parse": 5},
        letters_dropped=1,
        in_flight=2,
        sinks={
            "sinks.kafka.out": SinkStats(delivered_payloads=12_000, refused=3),
            "sinks.filesystem.log": SinkStats(),
        },
    )

    assert format_summary(pipeline(engine), 61.0).splitlines() == [
        "messages        12,345 in 1 min 1 s, 202/s",
        "tasks           12,300 done, 45 failed, 7 retried",
        "dead letters    45 (5 parse, 40 task), 1 DROPPED",
        "filesystem.log  0 delivered",
        "kafka.out       12,000 delivered, 3 rejected",
        "left over       2 messages, which the next run processes again",
    ]
    assert "missing" not in format_summary(pipeline(engine), 61.0)
    missing = "missing         7 messages, deleted by the broker before being read"
    assert format_summary(pipeline(engine), 61.0, 7).endswith(missing)


def test_sums_are_over_ended_engines_too() -> None:
    ended = EngineProgress(tasks_retried=2, letter_kinds={"task": 1})
    now = EngineProgress(tasks_retried=3, letter_kinds={"task": 2, "hook": 1})

    total = sum_progress([ended], [now])

    assert (total.tasks_retried, total.letter_kinds) == (5, {"task": 3, "hook": 1})
    assert (ended.letter_kinds, now.letter_kinds) == ({"task": 1}, {"task": 2, "hook": 1})


def test_spans_of_time_are_short() -> None:
    assert [format_seconds(number) for number in (0.0, 59.6, 3599.6)] == ["0 s", "1 min 0 s", "1 h 0 min"]
