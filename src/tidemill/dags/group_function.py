"""`@task_group`: turns a function that creates tasks into one that creates a group of them, or a mapped group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, overload

from tidemill.dags.edges import Node
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupCall, GroupOutput
from tidemill.dags.looping import LoopedTaskGroup, check_until
from tidemill.dags.map_sources import ALL_ARGUMENTS, ExpandInput, read_dicts, read_source
from tidemill.dags.maps.mapped_group import MappedTaskGroup, check_names

#: The arguments of a mapped group itself, as opposed to those of the function.
_OPTIONS: Final = ("max_outstanding", "max_failed_elements")


@overload
def task_group(function: Callable[..., Any], /) -> GroupFunction: ...
@overload
def task_group(
    function: None = None, /, *, group_id: str | None = None, **arguments: Any
) -> Callable[[Callable[..., Any]], GroupFunction]: ...
def task_group(function: Any = None, /, *, group_id: str | None = None, **arguments: Any) -> Any:
    """Turn a function that creates tasks into one that creates a group with those tasks each time it is called.

    The call returns the function's return value if that is a task output or a collection of task outputs; otherwise it
    returns the group. Either can be used in edges.

    Args:
        function: The function.
        group_id: The id of the group; by default the name of the function. A number is appended if the id is in use.
        arguments: More arguments of `TaskGroup`.
    """
    if function is None:
        return lambda function: GroupFunction(function, {**arguments, "group_id": group_id or function.__name__})
    return GroupFunction(function, {**arguments, "group_id": group_id or function.__name__})


class GroupFunction:
    """A function decorated with `@task_group`.

    Args:
        function: The function.
        arguments: The arguments of `TaskGroup`.
        shared: Arguments of the function that were given by `partial`.
        limits: Arguments of a mapped group that were given by `partial`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        shared: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = function
        self._arguments = dict(arguments)
        self._shared = dict(shared or {})
        self._limits = dict(limits or {})
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Create a group that is not mapped."""
        group = GroupCall(**self._group_arguments)
        return _fill(group, functools.partial(self.function, *args, **{**self._shared, **kwargs}))

    def override(self, **arguments: Any) -> GroupFunction:
        """Return a copy of this function with some arguments of the group replaced."""
        return GroupFunction(self.function, {**self._arguments, **arguments}, self._shared, self._limits)

    def partial(self, /, *args: Any, **shared: Any) -> GroupFunction:
        """Return a copy of this function with arguments that all elements of a mapped group share.

        Args:
            args: None; arguments are passed by name.
            shared: Arguments of the function, or of the mapped group: `max_outstanding`, the number of runs of the
                group that may be unfinished at a time, and `max_failed_elements`, the number that may fail before no
                more are started.

        Raises:
            DagError: An argument is passed by position, or the function does not have it.
        """
        if args:
            raise DagError(f"{self._owner}: partial() accepts no positional arguments; pass them by name")
        given = inspect.signature(self.function).parameters
        limits = {name: value for name, value in shared.items() if name in _OPTIONS and name not in given}
        ours = {name: value for name, value in shared.items() if name not in limits}
        check_names(self._owner, self.function, list(ours), "partial")
        return GroupFunction(self.function, self._arguments, {**self._shared, **ours}, {**self._limits, **limits})

    def expand(self, /, *args: Any, **sources: Any) -> Any:
        """Create a group whose tasks run for each combination of the values of the arguments.

        Inside of the function, such an argument can be passed to tasks, which get its value when they run.

        Args:
            args: None; arguments are passed by name.
            sources: For each argument, a list, a dict (whose items are pairs of key and value), a param, or the output
                of a task. The values of the last argument vary fastest; those of a generator task vary slowest.

        Raises:
            DagError: An argument is invalid.
        """
        if args:
            raise DagError(
                f"{self._owner}: expand() accepts no positional arguments; pass them by name: expand(x=[...])"
            )
        if not sources:
            raise DagError(f"{self._owner}: expand() needs the arguments to map over: expand(x=[...])")
        self._check(list(sources), "expand")
        return self._create(
            ExpandInput({name: read_source(self._owner, name, value) for name, value in sources.items()})
        )

    def expand_kwargs(self, kwargs: Any) -> Any:
        """Create a group whose tasks run for each dict of arguments.

        Inside of the function, all arguments that `partial` has not given can be passed to tasks, which get their
        values when they run; one that a dict does not give has the default of the parameter.

        Args:
            kwargs: A list of dicts, a param, or the output of a task that returns such a list.

        Raises:
            DagError: An argument is invalid.
        """
        for one in inspect.signature(self.function).parameters.values():
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise DagError(
                    f"{self._owner}: expand_kwargs() has to know the names of the arguments, so {one} of "
                    f"{self.function.__name__} is not supported; name the parameters"
                )
        root = read_dicts(self._owner, kwargs, lambda item: self._check(list(item), "expand_kwargs"))
        return self._create(ExpandInput({ALL_ARGUMENTS: root}))

    def loop(self, *, max_iterations: int, until: Callable[..., Any] | None = None, on_max: str = "fail") -> Any:
        """Create a group whose tasks run again until a function says that the result is good enough.

        Functions of its tasks, and `until`, may take the keyword `loop` (`tidemill.dags.looping.LoopState`).

        Args:
            max_iterations: The most iterations.
            until: Returns after each iteration whether it was the last, as a bool or a `LoopDecision`; None: there are
                `max_iterations`.
            on_max: What happens if `until` wants more than `max_iterations`: `fail` or `succeed`.

        Raises:
            DagError: An argument is invalid.
        """
        check_until(self._owner, until, on_max)
        if self._limits:
            raise DagError(f"{self._owner}: {min(self._limits)} is for expand(); a loop has one iteration at a time")
        group = LoopedTaskGroup(
            function=self.function, shared=self._shared, max_iterations=max_iterations, **self._group_arguments
        )
        try:
            inspect.signature(self.function).bind(**self._shared)
        except TypeError as error:
            raise DagError(f"{self._owner}: {error}; give it in partial()") from None
        with group:
            group.output = self.function(**self._shared)
            group.close(group.output, until, on_max)
        return GroupOutput(group) if isinstance(group.output, Node | dict | list | tuple) else group

    def iterate(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise an error: the tasks of a group have attempts of their own."""
        raise DagError(
            f"{self._owner}: iterate() of a @task_group is not supported, because each of its tasks has attempts of "
            "its own; use expand(), or iterate a @task"
        )

    def iterate_kwargs(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise an error: see `iterate`."""
        self.iterate()

    def chunk(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise an error: the tasks of a group get single values."""
        raise DagError(
            f"{self._owner}: chunk() of a @task_group is not supported; put the values into lists in a task, and map "
            "the group over its output"
        )

    @property
    def _owner(self) -> str:
        return f"group {self._arguments['group_id']!r}"

    @property
    def _group_arguments(self) -> dict[str, Any]:
        tooltip = (inspect.getdoc(self.function) or "").partition("\n")[0]
        return {"tooltip": tooltip, "add_suffix_on_collision": True, **self._arguments}

    def _check(self, names: list[str], call: str) -> None:
        for name in names:
            if name in self._shared:
                raise DagError(
                    f"{self._owner}: argument {name!r} is in partial() and in {call}(); give it in one of them"
                )
        check_names(self._owner, self.function, names, call)

    def _create(self, expand_input: ExpandInput) -> Any:
        group = MappedTaskGroup(
            function=self.function,
            expand_input=expand_input,
            shared=self._shared,
            **self._limits,
            **self._group_arguments,
        )
        given = {**self._shared, **group.arguments}
        try:
            inspect.signature(self.function).bind(**given)
        except TypeError as error:
            raise DagError(f"{self._owner}: {error}; give it in partial() or expand()") from None
        return _fill(group, functools.partial(self.function, **given))


def _fill(group: GroupCall, function: Callable[[], Any]) -> Any:
    """Create the tasks of a group, and return what stands for it."""
    with group:
        group.output = function()
    # Edges connect to the whole group; the returned value is passed on to tasks.
    return GroupOutput(group) if isinstance(group.output, Node | dict | list | tuple) else group
