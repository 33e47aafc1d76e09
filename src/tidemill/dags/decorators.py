"""Turns functions into tasks: `@task`, `@task.branch`, `@task.short_circuit`, `@task.sensor`, `@task.bash`.

Calling a decorated function inside a DAG creates a task and returns its output; `expand` creates a mapped one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from tidemill.core.tasks.structure import ChunkStructure
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupOutput, find_open_group
from tidemill.dags.scope import open_dags
from tidemill.dags.xcom_arg import PlainXComArg

#: The operator class for each decorator, imported on first use.
_CLASSES: Final = {
    "python": "tidemill.dags.operators.python:PythonOperator",
    "branch": "tidemill.dags.operators.python:BranchPythonOperator",
    "short_circuit": "tidemill.dags.operators.python:ShortCircuitOperator",
    "sensor": "tidemill.dags.sensors.python:PythonSensor",
    "bash": "tidemill.dags.operators.bash:PythonBashOperator",
}


#: The arguments that only a mapped task has; other tasks ignore them.
_MAP_OPTIONS: Final = ("max_outstanding", "max_failed_elements", "map_index_template", "task_concurrency")


class TaskFunction:
    """A function that creates a task each time it is called.

    Args:
        function: The function that the task calls when it runs.
        kind: The name of the decorator, a key of `_CLASSES`.
        options: Arguments of the operator.
        shared: Arguments of the function that were given by `partial`.
        chunking: How the values of a map are put into lists, given by `chunk`.
    """

    #: Tells a task function from a plain one, for modules that this one imports.
    is_task_function: Final = True

    def __init__(
        self,
        function: Callable[..., Any],
        kind: str,
        options: Mapping[str, Any],
        shared: Mapping[str, Any] | None = None,
        chunking: ChunkStructure | None = None,
    ) -> None:
        if isinstance(function, TaskFunction):
            raise DagError(f"{function!r} is already a @task function; remove the second decorator")
        self.function: Callable[..., Any] = function
        self.kind = kind
        self.options = dict(options)
        self.shared = dict(shared or {})
        self.chunking = chunking
        self.is_setup = self.is_teardown = self.on_failure_fail_dagrun = False
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> PlainXComArg:
        """Create a task and return its output.

        Raises:
            DagError: No DAG is open, or the function does not accept the arguments.
        """
        if self.chunking is not None:
            raise DagError(f"{self._owner}: chunk() is for mapped tasks; call expand(x=...) after it")
        options = {**self._defaults, **self.options}
        options["task_id"] = _number_id(options)
        given = {name: options.pop(name, None) for name in _MAP_OPTIONS}
        operator = self._operator_class(
            python_callable=self.function,
            op_args=[_unwrap(value) for value in args],
            op_kwargs={key: _unwrap(value) for key, value in {**self.shared, **kwargs}.items()},
            **options,
        )
        if operator.mapped_group is not None:
            operator.set_index_template(given["map_index_template"])
        return self._close(operator)

    def _close(self, operator: Any) -> PlainXComArg:
        """Make a new task a setup or a teardown, if the function is one, and return its output."""
        if self.is_setup:
            operator.as_setup()
        if self.is_teardown:
            operator.as_teardown(on_failure_fail_dagrun=self.on_failure_fail_dagrun)
        output: PlainXComArg = operator.output
        return output

    @functools.cached_property
    def _defaults(self) -> Mapping[str, Any]:
        """The operator arguments that are derived from the function."""
        found = {"task_id": self.function.__name__, "doc_md": inspect.getdoc(self.function)}
        return found | {"multiple_outputs": _returns_dict(self.function)} if self.kind == "python" else found

    @functools.cached_property
    def _operator_class(self) -> Any:
        module, _, name = _CLASSES[self.kind].partition(":")
        return getattr(importlib.import_module(module), name)

    def override(self, **options: Any) -> TaskFunction:
        """Return a copy of this task function with some arguments of the operator replaced."""
        return self._change({**self.options, **options}, self.shared)

    def partial(self, /, *args: Any, **shared: Any) -> TaskFunction:
        """Return a copy of this task function with arguments that all elements of a map share.

        Args:
            args: None; arguments are passed by name.
            shared: Arguments of the function, or of the map: `max_outstanding`, `max_failed_elements`,
                `map_index_template` and `task_concurrency`, which `@task` and `override` accept, too.

        Raises:
            DagError: An argument is passed by position.
        """
        if args:
            raise DagError(f"{self._owner}: partial() accepts no positional arguments; pass them by name")
        given = set(inspect.signature(self.function).parameters)
        options = {name: value for name, value in shared.items() if name in _MAP_OPTIONS and name not in given}
        ours = {name: _unwrap(value) for name, value in shared.items() if name not in options}
        return self._change({**self.options, **options}, {**self.shared, **ours})

    def chunk(self, max_items: int, max_wait: float | timedelta | None = None) -> TaskFunction:
        """Return a copy of this task function whose elements get lists of values instead of values.

        Args:
            max_items: The maximum number of values of a list.
            max_wait: How many seconds the first value of a list waits for others while a generator task yields them;
                None: until the list is full, or the generator has ended.

        Raises:
            DagError: A limit is out of range.
        """
        build = importlib.import_module("tidemill.dags.maps.target").build_chunk
        return self._change(self.options, self.shared, build(self._owner, self.chunking, max_items, max_wait))

    def expand(self, /, *args: Any, **sources: Any) -> PlainXComArg:
        """Create a mapped task, and return its output; see `tidemill.dags.maps.expanding.OperatorPartial.expand`.

        Raises:
            DagError: An argument is invalid.
        """
        return self._close(self._expanding.expand(self._target, args, sources))

    def iterate(self, /, *args: Any, **sources: Any) -> PlainXComArg:
        """Create a task that runs for all values in one attempt, and return its output.

        See `tidemill.dags.maps.expanding.OperatorPartial.iterate`.

        Raises:
            DagError: An argument is invalid, or the function cannot run like this.
        """
        return self._close(self._expanding.iterate(self._target, args, sources))

    def iterate_kwargs(self, kwargs: Any, *, strict: bool = True) -> PlainXComArg:
        """Create a task that runs for all dicts of arguments in one attempt, and return its output.

        Raises:
            DagError: An argument is invalid, or the function cannot run like this.
        """
        return self._close(self._expanding.iterate_kwargs(self._target, kwargs, strict))

    def expand_kwargs(self, kwargs: Any, *, strict: bool = True) -> PlainXComArg:
        """Create a mapped task, and return its output.

        See `tidemill.dags.maps.expanding.OperatorPartial.expand_kwargs`.

        Raises:
            DagError: An argument is invalid.
        """
        return self._close(self._expanding.expand_kwargs(self._target, kwargs, strict))

    @property
    def _expanding(self) -> Any:
        return importlib.import_module("tidemill.dags.maps.expanding")

    @property
    def _owner(self) -> str:
        return f"task {self.options.get('task_id', self.function.__name__)!r}"

    @property
    def _target(self) -> Any:
        """The operator and the arguments that all elements share."""
        options = {**self._defaults, **self.options}
        options["task_id"] = _number_id(options)
        given = {"python_callable": self.function, "op_args": [], "op_kwargs": self.shared, **options}
        return self._expanding.MapTarget(self._operator_class, given, self.function, self.chunking)

    def _change(
        self, options: Mapping[str, Any], shared: Mapping[str, Any], chunking: ChunkStructure | None = None
    ) -> TaskFunction:
        changed = TaskFunction(self.function, self.kind, options, shared, chunking or self.chunking)
        changed.is_setup, changed.is_teardown = self.is_setup, self.is_teardown
        changed.on_failure_fail_dagrun = self.on_failure_fail_dagrun
        return changed


class TaskDecorator:
    """`@task` and its variants, such as `@task.branch`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Turn a function into one that creates tasks.

        Args:
            function: The function; None when the decorator is called with options, as in `@task(retries=2)`.
            options: Arguments of the operator.
        """
        if function is None:
            return functools.partial(TaskFunction, kind=self._kind, options=options)
        if not callable(function):
            raise DagError(f"@task needs a function, got {function!r}; pass options by name")
        return TaskFunction(function, self._kind, options)


class _Task(TaskDecorator):
    branch = TaskDecorator("branch")
    short_circuit = TaskDecorator("short_circuit")
    sensor = TaskDecorator("sensor")
    bash = TaskDecorator("bash")
    python = TaskDecorator("python")


task = _Task("python")


def setup(function: Any) -> TaskFunction:
    """Turn a function, or a `@task` function, into one that creates setup tasks."""
    found: TaskFunction = function if isinstance(function, TaskFunction) else task(function)
    found.is_setup = True
    return found


def teardown(function: Any = None, *, on_failure_fail_dagrun: bool = False) -> Any:
    """Turn a function, or a `@task` function, into one that creates teardown tasks.

    Args:
        function: The function; None when the decorator is called with options.
        on_failure_fail_dagrun: Whether a failure of the teardown fails the run.
    """
    if function is None:
        return functools.partial(teardown, on_failure_fail_dagrun=on_failure_fail_dagrun)
    found: TaskFunction = function if isinstance(function, TaskFunction) else task(function)
    found.is_teardown = True
    found.on_failure_fail_dagrun = on_failure_fail_dagrun
    return found


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, GroupOutput) else value


def _number_id(options: Mapping[str, Any]) -> str:
    """Return an unused id for a task, with a number appended if the function has been called before."""
    wanted: str = options["task_id"]
    group = options.get("task_group")
    dag = options.get("dag") or (group.dag if group is not None else None) or open_dags.current
    if dag is None:
        raise DagError(
            f"task {wanted!r} does not belong to a DAG; call the function inside `with DAG(...)` or a @dag function"
        )
    group = group or find_open_group(dag)
    full: str = group.prefix_id(wanted)
    found: str = dag.reserve_id(full, suffix=True)
    return wanted + found.removeprefix(full)


def _returns_dict(function: Callable[..., Any]) -> bool:
    """Return whether a function is annotated as returning a dict; each value of it then becomes an XCom of its own."""
    # Most functions have no return annotation, and resolving type hints takes a fifth of a task's creation time.
    if "return" not in getattr(function, "__annotations__", {}):
        return False
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:
        return False  # a name that is imported for type checkers only
    kind = typing.get_origin(returned) or returned
    return isinstance(kind, type) and issubclass(kind, Mapping)
