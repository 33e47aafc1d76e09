"""Task outputs as arguments: passing one to a task adds an edge, and the task receives the value when it runs."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import FunctionType, NoneType
from typing import Any, Final, Protocol

from tidemill.dags.edges import Node, TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupOutput

#: The key of a task's return value.
RETURN_VALUE: Final = "return_value"
#: Argument types that cannot contain a task output.
PLAIN_TYPES: Final = frozenset({str, int, float, bool, NoneType, timedelta, datetime, FunctionType})


class RunValues(Protocol):
    """The values of a run that references resolve to."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The params of the run."""
        ...

    def read_xcom(self, task_id: str, key: str) -> Any:
        """Return the value that a task of the run pushed under a key; None if there is none."""
        ...


class RunValue(abc.ABC):
    """A reference to a value that exists only once a DAG runs."""

    @abc.abstractmethod
    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the tasks that must run before the value exists."""

    @abc.abstractmethod
    def resolve(self, values: RunValues) -> Any:
        """Return the value in a run."""


class DagParam(RunValue):
    """A param of the run, as an argument of a `@dag` function.

    Args:
        name: The name of the param.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield nothing: a param depends on no task."""
        return iter(())

    def resolve(self, values: RunValues) -> Any:
        """Return the value of the param in the run."""
        return values.params[self.name]

    def __str__(self) -> str:
        """Return a template of the param, for use inside strings."""
        return f"{{{{ params[{self.name!r}] }}}}"


class XComArg(RunValue, Node):
    """The output of a task, which exists once the task has run."""

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks of the output."""
        return list(self.iter_tasks())

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks of the output."""
        return list(self.iter_tasks())


class PlainXComArg(XComArg):
    """The value that a task pushes under a key.

    Args:
        operator: The task.
        key: The key.
    """

    def __init__(self, operator: Any, key: str = RETURN_VALUE) -> None:
        self.operator = operator
        self.key = key

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the task."""
        yield self.operator

    def resolve(self, values: RunValues) -> Any:
        """Return the pushed value; None if there is none."""
        return values.read_xcom(self.operator.task_id, self.key)

    def __getitem__(self, key: str) -> PlainXComArg:
        """Return the output under another key, as tasks with `multiple_outputs` push it."""
        if not isinstance(key, str):
            raise TypeError(
                f"the output of task {self.operator.task_id!r} is not known while the file is parsed, so it has no "
                f"item {key!r}; use a string key, and multiple_outputs=True in the task"
            )
        return PlainXComArg(self.operator, key)

    def __iter__(self) -> Iterator[Any]:
        """Raise an error: the number of items is unknown while the file is parsed."""
        raise TypeError(
            f"the output of task {self.operator.task_id!r} is not known while the file is parsed, so it cannot be "
            "iterated over here; iterate in a task"
        )

    def __bool__(self) -> bool:
        """Raise an error: the value is unknown while the file is parsed."""
        raise TypeError(
            f"the output of task {self.operator.task_id!r} is not known while the file is parsed; to decide by it, use "
            "@task.branch or @task.short_circuit"
        )

    def __str__(self) -> str:
        """Return a template of the output, for use inside strings."""
        key = "" if self.key == RETURN_VALUE else f", key={self.key!r}"
        return f"{{{{ task_instance.xcom_pull(task_ids={self.operator.task_id!r}{key}) }}}}"

    def __repr__(self) -> str:
        return f"<XComArg {self.operator.task_id}.{self.key}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PlainXComArg):
            return self.operator is other.operator and self.key == other.key
        return NotImplemented

    def __hash__(self) -> int:
        return hash((id(self.operator), self.key))

    # In edges and as setup or teardown, an output stands for its task, since most tasks are written as @task functions.

    def as_setup(self) -> PlainXComArg:
        """Make the task a setup; see `BaseOperator.as_setup`."""
        self.operator.as_setup()
        return self

    def as_teardown(self, *, setups: Any = None, on_failure_fail_dagrun: bool | None = None) -> PlainXComArg:
        """Make the task a teardown; see `BaseOperator.as_teardown`."""
        self.operator.as_teardown(setups=setups, on_failure_fail_dagrun=on_failure_fail_dagrun)
        return self

    def __enter__(self) -> PlainXComArg:
        """Open the scope of the task; see `BaseOperator.__enter__`."""
        self.operator.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.operator.__exit__(*error)


def list_outputs(owner: str, name: str, value: Any) -> list[RunValue]:
    """Return the task outputs in an argument, at any depth of lists, tuples, sets and dicts.

    Raises:
        DagError: The argument contains a task instead of its output, or contains itself.
    """
    try:
        return list(_find_outputs(value))
    except RecursionError:
        raise DagError(f"{owner}: argument {name!r} contains itself, or is nested too deeply") from None


def _find_outputs(value: Any) -> Iterator[RunValue]:
    # The types are tested in order of frequency, because a file may have thousands of tasks.
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
