"""What is logged of a run where there is no terminal, and how its end is shown."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from tests.until import wait_until

from tidemill.cli.terminal import watching
from tidemill.cli.terminal.watching import describe_change, list_fields, show_summary, watch
from tidemill.config.settings import LoggingSettings
from tidemill.runtime.link.progress import EngineProgress
from tidemill.runtime.log.setup import configure
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress
from tidemill.spark.run_state import RunPhase, RunState


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    made = io.StringIO()
    configure(LoggingSettings(), stream=made)
    yield made
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def pipeline(**counts: object) -> PipelineProgress:
    engine = EngineProgress(**counts)  # type: ignore[arg-type]
    return sum_progress((), [engine], [EngineStatus(0, "running", progress=engine)])


def test_without_a_terminal_each_change_of_state_is_logged_once(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LOOK_SECONDS", 0.01)
    now = [(RunState(step="Spark is starting", step_seconds=1.0), PipelineProgress())]

    def said() -> list[dict[str, object]]:
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    with watch(lambda rate, width: "", lambda: now[0], list_fields, plain=True):
        wait_until(lambda: len(said()) == 1)
        now[0] = (
            RunState(RunPhase.RUNNING),
            pipeline(messages_done=3, partitions=["t/0"], lag={"t/0": 2}, tasks_failed=1),
        )
        wait_until(lambda: len(said()) == 2)
        now[0] = (
            RunState(RunPhase.RUNNING),
            pipeline(messages_done=4, partitions=["t/0"], waits={"kafka": "no broker"}),
        )
        wait_until(lambda: len(said()) == 3)

    first, second, third = said()
    assert (first["event"], first["state"], first["waits_for"]) == ("status", "starting", "Spark is starting (1 s)")
    assert second["engines"] == "1/1"
    assert (second["messages_done"], second["lag"], second["tasks_failed"]) == (3, 2, 1)
    assert (third["lag"], third["waits_for"]) == (None, {"kafka": "no broker"})


def test_a_state_is_what_is_waited_for_and_not_for_how_long() -> None:
    step = [RunState(step="Spark is starting", step_seconds=seconds) for seconds in (1.0, 2.0)]
    assert describe_change(step[0], PipelineProgress()) == describe_change(step[1], PipelineProgress())
    running = RunState(RunPhase.RUNNING)
    assert describe_change(running, pipeline(messages_done=1)) == describe_change(running, pipeline(messages_done=2))
    assert describe_change(running, pipeline()) != describe_change(running, pipeline(waits={"kafka": "x"}))
    assert describe_change(running, pipeline()) != describe_change(RunState(RunPhase.DRAINING), pipeline())


def test_the_summary_is_an_entry_where_logs_are_for_machines_and_text_otherwise(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    done = pipeline(messages_done=10, tasks_retried=2, letter_kinds={"task": 1}, dead_lettered=1)

    show_summary(done, 5.0)
    configure(LoggingSettings(format="console"), stream=stream)
    show_summary(done, 5.0)

    entry = json.loads(stream.getvalue())
    assert entry["event"] == "summary"
    assert (entry["messages_done"], entry["per_second"], entry["tasks_retried"]) == (10, 2.0, 2)
    assert entry["dead_letters"] == {"task": 1}
    assert capsys.readouterr().err.startswith("messages      10 in 5 s, 2/s\n")
