"""Task outputs as arguments: passing one to a task adds an edge, and the task receives the value when it runs."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import FunctionType, NoneType
from typing import Any, Final, Protocol

from tidemill.dags.attempt.lazy_sequence import LazySequence
from tidemill.dags.edges import Node, TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupOutput

#: The key of a task's return value.
RETURN_VALUE: Final = "return_value"
#: Argument types that cannot contain a task output.
PLAIN_TYPES: Final = frozenset({str, int, float, bool, NoneType, timedelta, datetime, FunctionType})
#: Stands for a `fillvalue` that was not given, and for the item that a shorter part of a `zip` lacks.
MISSING: Final = object()


class RunValues(Protocol):
    """The values of a run that references resolve to."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The params of the run."""
        ...

    def read_xcom(self, task_id: str, key: str) -> Any:
        """Return the value that a task of the run pushed under a key; None if there is none."""
        ...

    def read_sequence(self, task_id: str, key: str) -> Sequence[Any]:
        """Return the values that the elements of a map pushed under a key, or that a generator yielded."""
        ...

    def read_argument(self, argument: MappedArgument) -> Any:
        """Return the value that the element of a mapped group has for an argument of its function."""
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

    def __repr__(self) -> str:
        return f"<DagParam {self.name}>"


class XComArg(RunValue, Node):
    """The output of a task, which exists once the task has run."""

    def map(self, f: Callable[[Any], Any]) -> MapXComArg:
        """Return the output with a function applied to each item.

        The function runs in the attempt of the element that gets the item. `AirflowSkipException` in it skips the
        element.

        Args:
            f: A plain function of one argument, not a `@task` function.
        """
        return MapXComArg(self, (f,))

    def zip(self, *others: RunValue, fillvalue: Any = MISSING) -> ZipXComArg:
        """Return tuples of the items with equal index of this output and of others.

        Args:
            others: The other outputs or params.
            fillvalue: Stands for the items that shorter outputs lack; if it is left out, the shortest output ends the
                pairs.
        """
        return ZipXComArg((self, *others), fillvalue)

    def concat(self, *_: Any) -> Any:
        """Raise an error: there is no concatenation."""
        raise DagError(f"{self!r}: concat() is not supported; join the lists in a task, and map over its output")

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks of the output."""
        return list(self.iter_tasks())

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks of the output."""
        return list(self.iter_tasks())

    def __iter__(self) -> Iterator[Any]:
        """Raise an error: the number of items is unknown while the file is parsed."""
        raise TypeError(
            f"{self._name} is not known while the file is parsed, so it cannot be iterated over here; iterate in a "
            "task, or map a task over it: .expand(x=...)"
        )

    def __bool__(self) -> bool:
        """Raise an error: the value is unknown while the file is parsed."""
        raise TypeError(
            f"{self._name} is not known while the file is parsed; to decide by it, use @task.branch or "
            "@task.short_circuit"
        )

    def __str__(self) -> str:
        """Raise an error: only a plain output has a template."""
        raise TypeError(f"{self._name} cannot be part of a string; pass it to a task as an argument")

    @property
    def _name(self) -> str:
        return f"the output {self!r}"


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
        """Return the pushed value; None if there is none. For a map or a generator, return a `LazySequence`."""
        operator = self.operator
        is_lazy = operator.is_generator and not operator.handles_streams and self.key == RETURN_VALUE
        if operator.is_mapped or is_lazy:
            return values.read_sequence(operator.task_id, self.key)
        return values.read_xcom(operator.task_id, self.key)

    def __getitem__(self, key: str) -> PlainXComArg:
        """Return the output under another key, as tasks with `multiple_outputs` push it.

        Raises:
            DagError: The task runs all its elements in one attempt, which stores one result of each.
        """
        if not isinstance(key, str):
            raise TypeError(
                f"the output of task {self.operator.task_id!r} is not known while the file is parsed, so it has no "
                f"item {key!r}; use a string key, and multiple_outputs=True in the task"
            )
        if getattr(self.operator, "is_iterated", False):
            raise DagError(
                f"task {self.operator.task_id!r} runs all its elements in one attempt, so its output has no item "
                f"{key!r}; take the whole output, which has all results"
            )
        return PlainXComArg(self.operator, key)

    @property
    def _name(self) -> str:
        return f"the output of task {self.operator.task_id!r}"

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


class MapXComArg(XComArg):
    """An output with functions applied to each item: `output.map(f)`.

    Args:
        arg: The output.
        functions: The functions, in order.
    """

    def __init__(self, arg: RunValue, functions: tuple[Callable[[Any], Any], ...]) -> None:
        for each in functions:
            if not callable(each) or getattr(each, "is_task_function", False) or inspect.iscoroutinefunction(each):
                raise DagError(
                    f"{arg!r}: map() needs a plain function that takes an item, got {each!r}; call other tasks by "
                    "mapping them with expand()"
                )
        self.arg = arg
        self.functions = functions

    def map(self, f: Callable[[Any], Any]) -> MapXComArg:
        """Return the output with one more function applied to each item."""
        return MapXComArg(self.arg, (*self.functions, f))

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the tasks of the output."""
        yield from self.arg.iter_tasks()

    def resolve(self, values: RunValues) -> Any:
        """Return a sequence that applies the functions when an item is read."""
        return _MappedItems(_list_items(self.arg, values), self.apply)

    def apply(self, item: Any) -> Any:
        """Return the result of the functions for an item."""
        for each in self.functions:
            item = each(item)
        return item

    def __repr__(self) -> str:
        return repr(self.arg) + "".join(f".map({getattr(each, '__name__', repr(each))})" for each in self.functions)


class ZipXComArg(XComArg):
    """Outputs paired by index: `output.zip(other)`; the results of a map have the indexes of its elements.

    Args:
        args: The outputs.
        fillvalue: Stands for missing items; `MISSING`: a pair lacking one is left out.
    """

    def __init__(self, args: tuple[RunValue, ...], fillvalue: Any = MISSING) -> None:
        self.args = tuple(each.value if isinstance(each, GroupOutput) else each for each in args)
        for each in self.args:
            if not isinstance(each, RunValue):
                raise DagError(
                    f"{args[0]!r}: zip() pairs outputs of tasks and params, got {each!r}; return the list from a @task"
                )
        self.fillvalue = fillvalue

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the tasks of the outputs."""
        for each in self.args:
            yield from each.iter_tasks()

    def resolve(self, values: RunValues) -> Any:
        """Return the tuples."""
        parts = [_index_items(_list_items(each, values)) for each in self.args]
        indexes = (set.intersection if self.fillvalue is MISSING else set.union)(*[set(part) for part in parts])
        return [tuple(part.get(index, self.fillvalue) for part in parts) for index in sorted(indexes)]

    def join(self, items: Sequence[Any]) -> Any:
        """Return the tuple of items, of which some may be `MISSING`; `MISSING` if the pairs have ended."""
        if self.fillvalue is MISSING:
            return MISSING if any(each is MISSING for each in items) else tuple(items)
        if all(each is MISSING for each in items):
            return MISSING
        return tuple(self.fillvalue if each is MISSING else each for each in items)

    def __repr__(self) -> str:
        return f"{self.args[0]!r}.zip({', '.join(repr(each) for each in self.args[1:])})"


class MappedArgument(XComArg):
    """An argument of a mapped `@task_group` function: it stands for the value that each element of the group has.

    Args:
        group: The `MappedTaskGroup`.
        name: The name of the argument.
        default: Its default; `MISSING`: it has none.
    """

    def __init__(self, group: Any, name: str, default: Any = MISSING) -> None:
        self.group = group
        self.name = name
        self.default = default

    def iter_tasks(self) -> Iterator[TaskNode]:
        """Yield the tasks whose outputs are in the lists that the group is mapped over.

        Raises:
            DagError: The argument is used outside of its group.
        """
        self.group.check_open(self)
        yield from self.group.find_outputs(self.name)

    def find_roots(self) -> Sequence[TaskNode]:
        """Return no tasks: an argument has no edges."""
        return ()

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return no tasks: an argument has no edges."""
        return ()

    def resolve(self, values: RunValues) -> Any:
        """Return the value in the element of the group that the running task belongs to."""
        return values.read_argument(self)

    def __getitem__(self, key: Any) -> Any:
        """Raise an error: the value is unknown while the file is parsed."""
        raise TypeError(f"{self._name} is not known while the file is parsed; read its item {key!r} in a task")

    @property
    def _name(self) -> str:
        return f"the argument {self.name!r} of the mapped group {self.group.group_id!r}"

    def __repr__(self) -> str:
        return f"<MappedArgument {self.name!r} of group {self.group.group_id!r}>"


class _MappedItems(Sequence[Any]):
    """The items of a sequence with a function applied to each when it is read."""

    def __init__(self, items: Sequence[Any], apply: Callable[[Any], Any]) -> None:
        self._items = items
        self._apply = apply

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _MappedItems(self._items[index], self._apply)
        return self._apply(self._items[index])

    def __iter__(self) -> Iterator[Any]:
        return (self._apply(item) for item in self._items)

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield the items with their indexes: in a map those of its elements."""
        return ((index, self._apply(item)) for index, item in _index_items(self._items).items())


def _index_items(items: Sequence[Any]) -> dict[int, Any]:
    """Return items by index."""
    is_sparse = isinstance(items, _MappedItems | LazySequence)
    return dict(items.items() if is_sparse else enumerate(items))  # type: ignore[attr-defined]


def _list_items(arg: RunValue, values: RunValues) -> Sequence[Any]:
    """Return the items of a value: those of a sequence, or pairs of key and value of a dict.

    Raises:
        TypeError: The value is neither.
    """
    found = arg.resolve(values)
    if isinstance(found, Mapping):
        return list(found.items())
    if not isinstance(found, Sequence) or isinstance(found, str | bytes | bytearray):
        raise TypeError(f"{arg!r} is of type {type(found).__name__}; map() and zip() need a list or a dict")
    return found


def resolve_outputs(value: Any, values: RunValues) -> Any:
    """Return a value with the task outputs in it, at any depth of lists, tuples, sets and dicts, replaced by theirs."""
    if isinstance(value, GroupOutput):
        value = value.value
    if isinstance(value, RunValue):
        return value.resolve(values)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(resolve_outputs(item, values) for item in value))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(resolve_outputs(item, values) for item in value)
    if type(value) is dict:
        return {resolve_outputs(key, values): resolve_outputs(item, values) for key, item in value.items()}
    return value


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
