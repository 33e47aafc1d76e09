"""Outputs of tasks as arguments of others: passing one makes the other task wait, and is its value when that runs."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import FunctionType, NoneType
from typing import Any, Final, Protocol

from tidemill.dags.edges import Node, TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupOutput

#: The key of what a task returns.
RETURN_VALUE: Final = "return_value"
#: Types of arguments that contain no output of a task.
PLAIN_TYPES: Final = frozenset({str, int, float, bool, NoneType, timedelta, datetime, FunctionType})


class RunValues(Protocol):
    """What a run knows."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the run."""
        ...

    def read_xcom(self, task_id: str, key: str) -> Any:
        """Return what a task of the run pushed under a key; None: nothing."""
        ...


class RunValue(abc.ABC):
    """A value that exists once a DAG runs."""

    @abc.abstractmethod
    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the tasks that it is the output of."""

    @abc.abstractmethod
    def resolve(self, values: RunValues) -> Any:
        """Return the value in a run."""


class DagParam(RunValue):
    """A parameter of the run, as an argument of a `@dag` function.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        """Keep the name."""
        self.name = name

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield nothing: no task has to run first."""
        return iter(())

    def resolve(self, values: RunValues) -> Any:
        """Return the value of the run."""
        return values.params[self.name]

    def __str__(self) -> str:
        """Return a template for it, for use inside of texts."""
        return f"{{{{ params[{self.name!r}] }}}}"


class XComArg(RunValue, Node):
    """The output of a task, which exists once it has run."""

    def find_roots(self) -> Sequence[TaskNode]:
        """Return its tasks."""
        return list(self.iter_tasks())

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return its tasks."""
        return list(self.iter_tasks())


class PlainXComArg(XComArg):
    """What a task pushed under a key.

    Args:
        operator: The task.
        key: The key.
    """

    def __init__(self, operator: Any, key: str = RETURN_VALUE) -> None:
        """Keep both."""
        self.operator = operator
        self.key = key

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the task."""
        yield self.operator

    def resolve(self, values: RunValues) -> Any:
        """Return what was pushed; None: nothing was."""
        return values.read_xcom(self.operator.task_id, self.key)

    def __getitem__(self, key: str) -> PlainXComArg:
        """Return the output under another key, as a task with `multiple_outputs` pushes it."""
        if not isinstance(key, str):
            raise TypeError(
                f"the output of task {self.operator.task_id!r} is not known while the file is read, so it has no item "
                f"{key!r}; keys are texts, for tasks with multiple_outputs"
            )
        return PlainXComArg(self.operator, key)

    def __iter__(self) -> Iterator[Any]:
        """Refuse: how many items there are is not known while the file is read."""
        raise TypeError(
            f"the output of task {self.operator.task_id!r} is not known while the file is read, so it cannot be "
            "iterated over; do it in a task"
        )

    def __bool__(self) -> bool:
        """Refuse: the value is not known while the file is read."""
        raise TypeError(
            f"the output of task {self.operator.task_id!r} is not known while the file is read; use @task.branch or "
            "@task.short_circuit to decide by it"
        )

    def __str__(self) -> str:
        """Return a template for it, for use inside of texts."""
        key = "" if self.key == RETURN_VALUE else f", key={self.key!r}"
        return f"{{{{ task_instance.xcom_pull(task_ids={self.operator.task_id!r}{key}) }}}}"

    def __repr__(self) -> str:
        """Show the task and the key."""
        return f"<XComArg {self.operator.task_id}.{self.key}>"

    def __eq__(self, other: object) -> bool:
        """Compare task and key."""
        if isinstance(other, PlainXComArg):
            return self.operator is other.operator and self.key == other.key
        return NotImplemented

    def __hash__(self) -> int:
        """Hash task and key."""
        return hash((id(self.operator), self.key))

    # The output of a task stands for the task: setups and teardowns are usually written with @task functions.

    def as_setup(self) -> PlainXComArg:
        """Make its task a setup."""
        self.operator.as_setup()
        return self

    def as_teardown(self, *, setups: Any = None, on_failure_fail_dagrun: bool | None = None) -> PlainXComArg:
        """Make its task a teardown; see `BaseOperator.as_teardown`."""
        self.operator.as_teardown(setups=setups, on_failure_fail_dagrun=on_failure_fail_dagrun)
        return self

    def __enter__(self) -> PlainXComArg:
        """Open the scope of its task; see `BaseOperator.__enter__`."""
        self.operator.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.operator.__exit__(*error)


def list_outputs(owner: str, name: str, value: Any) -> list[RunValue]:
    """Return the outputs of tasks in an argument, at any depth of lists, tuples, sets and dicts.

    Raises:
        DagError: The argument is a task, not its output; or it contains itself.
    """
    try:
        return list(_find_outputs(value))
    except RecursionError:
        raise DagError(f"{owner}: argument {name!r} contains itself, or is nested too deeply") from None


def _find_outputs(value: Any) -> Iterator[RunValue]:
    # In the order of what arguments mostly are: a file may have thousands of tasks.
    if type(value) in PLAIN_TYPES:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _find_outputs(key)
            yield from _find_outputs(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _find_outputs(item)
    elif isinstance(value, RunValue):
        yield value
    elif isinstance(value, GroupOutput):
        yield from _find_outputs(value.value)
    elif isinstance(value, TaskNode):
        raise DagError(f"task {value.task_id!r} is passed as an argument; pass its output: `.output`")
