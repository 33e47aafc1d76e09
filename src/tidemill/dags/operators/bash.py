"""Operators that run a shell command."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tidemill.dags.exceptions import DagError, TaskError, TaskFailed, TaskSkipped
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.command import Command, build_environment, describe_exit
from tidemill.dags.operators.python import call_function, check_call, refuse_generator


class BashOperator(BaseOperator):
    """Runs a command in bash; returns the last line of its output.

    The command ends when bash exits. Background processes (`&`) may write for one more second and are then killed; to
    wait for them, end the command with `wait`.

    Args:
        bash_command: The command; a value that ends in `.sh` or `.bash` names a file that contains the template.
        env: The environment; None: the worker's environment.
        append_env: Whether to add `env` to the worker's environment instead of replacing it.
        output_encoding: The encoding of the output.
        skip_on_exit_code: The exit code, or several, that skip the task; None: no code does.
        cwd: The working directory; None: a new temporary one.
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
            TaskError: The command failed.
            TaskSkipped: The command exited with a code that skips the task.
        """
        return self.run_command(self.bash_command)

    def run_command(self, text: Any) -> str:
        """Run a command and return the last line of its output."""
        if not isinstance(text, str) or not text.strip():
            raise TaskFailed(f"the command must be a non-empty string, got {text!r}")
        environment = build_environment(self.env, append=self.append_env)
        self._command = Command(["bash", "-c", text], environment, self.cwd, self.log)
        result = self._command.run(encoding=self.output_encoding)
        if result.exit_code in self.skip_on_exit_code:
            raise TaskSkipped(describe_exit(result.exit_code))
        if result.exit_code:
            raise TaskError(describe_exit(result.exit_code))
        return result.last_line

    def on_kill(self) -> None:
        """Kill the command."""
        if self._command is not None:
            self._command.kill()


class PythonBashOperator(BashOperator):
    """Runs the command that a function returns: `@task.bash`.

    Args:
        python_callable: The function.
        op_args: Positional arguments of the function.
        op_kwargs: Keyword arguments of the function.
        kwargs: The arguments of `BashOperator`, except `bash_command`.
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
        if "bash_command" in kwargs:
            raise DagError(
                f"task {kwargs.get('task_id')!r}: @task.bash runs the command that the function returns; "
                "leave bash_command out"
            )
        super().__init__(bash_command="", **kwargs)
        self.python_callable = python_callable
        self.op_args = list(op_args or ())
        self.op_kwargs = dict(op_kwargs or {})
        check_call(f"task {self.task_id!r}", python_callable, self.op_args, self.op_kwargs)
        refuse_generator(self, python_callable)

    def execute(self, context: Any) -> str:
        """Call the function, and run the command that it returns."""
        return self.run_command(call_function(self.python_callable, self.op_args, self.op_kwargs, context))
