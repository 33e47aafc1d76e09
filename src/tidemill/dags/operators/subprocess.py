"""An operator that runs a program the way pipelines do: no shell, bytes on stdin and stdout, limits on both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.core.errors import escape_surrogates
from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError, TaskError, TaskSkipped
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.command import GRACE_SECONDS
from tidemill.pipeline.tasks.executor import Executor
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE


class SubprocessOperator(BaseOperator):
    """Runs a program; returns its standard output as text, or as bytes if it is not UTF-8.

    Args:
        args: The program (a path, or a name to look up in PATH) and its arguments.
        stdin: The standard input.
        env: Variables to add to the worker's environment.
        timeout: How long the program may run, as a timedelta or in seconds; None: no limit.
        max_output_bytes: The limit for the output; more is an error.
        skip_on_exit_code: The exit code that skips the task.
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
            TaskError: The program cannot be started, failed, took too long, or printed too much.
            TaskSkipped: The program exited with the code that skips the task.
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
        # The id of the task's process marks the program, so that its leftovers can be found and killed.
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
            # An attempt may be stopped from outside at any time, even while the program starts.
            await executor.kill_all(GRACE_SECONDS)
            executor.close()
