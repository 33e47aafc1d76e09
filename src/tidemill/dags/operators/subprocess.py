"""Runs a program as pipelines do: without a shell, with standard input and output as bytes, and limits on both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tidemill.config.executor_settings import ExecutorSettings
from tidemill.core.errors import escape_surrogates
from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError, TaskError, TaskSkipped
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.command import GRACE_SECONDS
from tidemill.pipeline.tasks.executor import Executor
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE


class SubprocessOperator(BaseOperator):
    """Runs a program; returns what it prints, as text, or as bytes where it is not UTF-8.

    Args:
        args: The program (a path, or a name to find along PATH) and its arguments.
        stdin: Its standard input.
        env: Added to the environment of the worker.
        timeout: How long it may take, as a timedelta or in seconds; None: any time.
        max_output_bytes: More output is an error.
        skip_on_exit_code: The exit code with which it skips the task.
        kwargs: The arguments of `BaseOperator`.
    """

    template_fields = ("args", "stdin", "env")
    ui_color = "#e9ecf5"

    def __init__(
        self,
        *,
        args: Sequence[str],
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: timedelta | float | None = None,
        max_output_bytes: int = 1 << 20,
        skip_on_exit_code: int | None = 99,
        **kwargs: Any,
    ) -> None:
        """Check the arguments."""
        super().__init__(**kwargs)
        owner = f"task {self.task_id!r}"
        if isinstance(args, str) or not args:
            raise DagError(f"{owner}: args must be a list of the program and its arguments, got {args!r}")
        self.args = list(args)
        self.stdin = stdin
        self.env = dict(env or {})
        self.timeout = None if timeout is None else check_duration(owner, "timeout", timeout).total_seconds()
        self.max_output_bytes = max_output_bytes
        self.skip_on_exit_code = skip_on_exit_code

    def execute(self, context: Any) -> str | bytes:
        """Run the program.

        Raises:
            TaskError: It cannot be started, failed, took too long, or printed too much.
            TaskSkipped: It ended with the exit code that skips the task.
        """
        outcome = asyncio.run(self._run())
        for line in outcome.stderr.decode(errors="backslashreplace").splitlines():
            self.log.info("%s", escape_surrogates(line))
        if outcome.kind is not None and outcome.exit_code is not None and outcome.exit_code == self.skip_on_exit_code:
            raise TaskSkipped(f"the program ended with exit code {outcome.exit_code}")
        if outcome.kind is not None or outcome.exit_code is None:
            said = outcome.exception or f"exit code {outcome.exit_code}"
            raise TaskError(f"{self.args[0]!r} failed ({outcome.kind or 'not started'}): {said}")
        try:
            return outcome.stdout.decode()
        except UnicodeDecodeError:
            return outcome.stdout

    async def _run(self) -> ProcessOutcome:
        settings = ExecutorSettings(max_stdout_bytes=self.max_output_bytes, env_inherit_deny=[])
        # The mark of the task's process: by it, what the program leaves behind is found.
        executor = Executor(settings, os.environ.get(ENGINE_ID_VARIABLE, ""))
        executor.open()
        ended: asyncio.Future[ProcessOutcome] = asyncio.get_running_loop().create_future()
        stdin = self.stdin.encode() if isinstance(self.stdin, str) else self.stdin
        argv = [str(part) for part in self.args]
        seconds = float("inf") if self.timeout is None else self.timeout
        try:
            executor.start(argv, stdin, self.env, seconds, ended.set_result)
            return await ended
        finally:
            # Also where the attempt is ended from outside, which may be in the middle of the start.
            await executor.kill_all(GRACE_SECONDS)
            executor.close()
