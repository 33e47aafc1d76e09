"""What an engine counts for status lines and summaries, and what a run of a handler logs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import structlog

from tidemill import ExecutorTask, Handler, PendingContext, SourceMessage
from tidemill.testing import run_handler


class Failing(Handler[str, str]):
    async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
        structlog.get_logger("handler").info("arranging")
        local_secret = "not shown"
        try:
            raise LookupError("no table")
        except LookupError:
            structlog.get_logger("handler").exception("no table yet")
        assert local_secret
        return [
            ExecutorTask(f"t-{m.offset}", args=["-c", f"exit {m.payload}"], source_offsets=[m.offset]) for m in messages
        ]


CONFIG = {
    "executor": {
        "binary_path": "sh",
        "max_retries": 2,
        "retry_backoff": {"initial_seconds": 0.001, "max_seconds": 0.001},
    },
    "logging": {"level": "WARNING"},
}


def test_attempts_that_failed_and_letters_by_kind_are_counted() -> None:
    progress = run_handler(Failing, [b"0", b"1", b"3", b"\xff"], CONFIG).summary.progress

    assert (progress.tasks_done, progress.tasks_failed, progress.tasks_retried) == (1, 2, 4)
    assert progress.letter_kinds == {"task": 2, "parse": 1}
    # Three tasks; two of them are tried three times.
    assert (sum(progress.attempts.counts), progress.attempts.seconds > 0) == (7, True)
    assert sum(progress.queue_waits.counts) == sum(progress.spawns.counts) == 7
    assert sum(progress.hooks["arrange"].counts) == 1
    assert list(progress.flow.values()) == [(4, 4, 0)]
    assert (sum(progress.batches.counts), progress.batches.seconds > 0) == (1, True), "one window"
    assert progress.dead_lettered == 3


def test_a_run_of_a_handler_honours_the_level_and_shows_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()

    run_handler(Failing, [b"0"], CONFIG)

    said = capsys.readouterr()
    assert "arranging" not in said.err + said.out
    assert said.err.count("LookupError: no table\n") == 1
    assert "not shown" not in said.err + said.out
    assert f"  {__file__.rpartition('/')[2]}" in said.err.replace("tests/pipeline/", "")
