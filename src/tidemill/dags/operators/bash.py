"""Runs a command of the shell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tidemill.dags.exceptions import DagError, TaskError, TaskFailed, TaskSkipped
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.command import Command, build_environment, describe_exit
from tidemill.dags.operators.python import call_function, check_call


class BashOperator(BaseOperator):
    """Runs a command in bash; returns the last line that it prints.

    The command is over when bash ends: what it started in the background (`&`) may print for a second longer, and is
    ended then. `wait` at the end of the command waits for it.

    Args:
        bash_command: The command; a name that ends in `.sh` or `.bash` is a file with a template.
        env: Its environment; None: that of the worker.
        append_env: Whether `env` is added to that of the worker, instead of replacing it.
        output_encoding: Of what it prints.
        skip_on_exit_code: The exit code, or those, with which it skips the task; None: none.
        cwd: Its folder; None: a new one.
        kwargs: The arguments of `BaseOperator`.
    """

    template_fields: Sequence[str] = ("bash_command", "env", "cwd")
    template_ext = (".sh", ".bash")
    ui_color = "#f0ede4"

    def __init__(
        self,
        *,
        bash_command: str,
        env: Mapping[str, str] | None = None,
        append_env: bool = False,
        output_encoding: str = "utf-8",
        skip_on_exit_code: int | Collection[int] | None = 99,
        cwd: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments."""
        super().__init__(**kwargs)
        self.bash_command = bash_command
        self.env = env
        self.append_env = append_env
        self.output_encoding = output_encoding
        codes = [] if skip_on_exit_code is None else skip_on_exit_code
        self.skip_on_exit_code = frozenset([codes] if isinstance(codes, int) else codes)
        self.cwd = cwd
        self._command: Command | None = None

    def execute(self, context: Any) -> str:
        """Run the command.

        Raises:
            TaskError: It failed.
            TaskSkipped: It ended with an exit code that skips the task.
        """
        return self.run_command(self.bash_command)

    def run_command(self, text: Any) -> str:
        """Run a command; return the last line that it prints."""
        if not isinstance(text, str) or not text.strip():
            raise TaskFailed(f"the command must be a string that is not empty, got {text!r}")
        environment = build_environment(self.env, append=self.append_env)
        self._command = Command(["bash", "-c", text], environment, self.cwd, self.log)
        result = self._command.run(encoding=self.output_encoding)
        if result.exit_code in self.skip_on_exit_code:
            raise TaskSkipped(describe_exit(result.exit_code))
        if result.exit_code:
            raise TaskError(describe_exit(result.exit_code))
        return result.last_line

    def on_kill(self) -> None:
        """End the command."""
        if self._command is not None:
            self._command.kill()


class PythonBashOperator(BashOperator):
    """Runs the command that a function returns: `@task.bash`.

    Args:
        python_callable: The function.
        op_args: Its arguments, in order.
        op_kwargs: Its arguments, by name.
        kwargs: The arguments of `BashOperator`, but for the command.
    """

    template_fields = ("op_args", "op_kwargs", "env", "cwd")

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check that the function accepts the arguments."""
        if "bash_command" in kwargs:
            raise DagError(
                f"task {kwargs.get('task_id')!r}: @task.bash runs what the function returns; leave bash_command out"
            )
        super().__init__(bash_command="", **kwargs)
        self.python_callable = python_callable
        self.op_args = list(op_args or ())
        self.op_kwargs = dict(op_kwargs or {})
        check_call(f"task {self.task_id!r}", python_callable, self.op_args, self.op_kwargs)

    def execute(self, context: Any) -> str:
        """Call the function, and run what it returns."""
        return self.run_command(call_function(self.python_callable, self.op_args, self.op_kwargs, context))
