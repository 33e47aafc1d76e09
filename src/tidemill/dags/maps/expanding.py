"""Creates mapped tasks: `Operator.partial(...).expand(x=[...])`, `expand_kwargs`, and the same of `@task` functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_bool
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import find_open_group
from tidemill.dags.map_sources import ALL_ARGUMENTS, ExpandInput, read_dicts, read_source
from tidemill.dags.maps.mapped import MappedOperator
from tidemill.dags.maps.target import MAP_OPTIONS, MapTarget, build_chunk
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operator_arguments import (
    check_names,
    collect_defaults,
    list_changed_defaults,
    list_names,
    name_task,
)
from tidemill.dags.operators.python import BranchPythonOperator, ShortCircuitOperator, is_generator
from tidemill.dags.scope import open_dags


class OperatorPartial:
    """An operator with the arguments that all elements of a map share; `expand` completes it.

    Args:
        target: The operator and the arguments.
    """

    def __init__(self, target: MapTarget) -> None:
        self._target = target
        self.is_expanded = False

    def expand(self, /, *args: Any, **sources: Any) -> MappedOperator:
        """Create the task, with an element for each combination of the values of the arguments.

        Args:
            args: None; arguments are passed by name.
            sources: For each argument, a list, a dict (whose items are pairs of key and value), a param, or the output
                of a task. The values of the last argument vary fastest; those of a generator task vary slowest.

        Raises:
            DagError: An argument is invalid.
        """
        self.is_expanded = True
        return expand(self._target, args, sources)

    def expand_kwargs(self, kwargs: Any, *, strict: bool = True) -> MappedOperator:
        """Create the task, with an element for each dict of arguments.

        Args:
            kwargs: A list of dicts, a param, or the output of a task that returns such a list.
            strict: Whether a dict may not have an argument that `partial` has given; otherwise it takes precedence.

        Raises:
            DagError: An argument is invalid.
        """
        self.is_expanded = True
        return expand_kwargs(self._target, kwargs, strict)

    def iterate(self, /, *args: Any, **sources: Any) -> MappedOperator:
        """Create the task; one attempt runs it for each combination of the values of the arguments.

        Args:
            args: None; arguments are passed by name.
            sources: See `expand`.

        Raises:
            DagError: An argument is invalid, or the operator cannot run like this.
        """
        self.is_expanded = True
        return iterate(self._target, args, sources)

    def iterate_kwargs(self, kwargs: Any, *, strict: bool = True) -> MappedOperator:
        """Create the task; one attempt runs it for each dict of arguments. See `expand_kwargs`.

        Raises:
            DagError: An argument is invalid, or the operator cannot run like this.
        """
        self.is_expanded = True
        return iterate_kwargs(self._target, kwargs, strict)

    def chunk(self, max_items: int, max_wait: float | timedelta | None = None) -> OperatorPartial:
        """Put the values that the task is mapped over into lists; an element gets one list.

        Args:
            max_items: The maximum number of values of a list.
            max_wait: How many seconds the first value of a list waits for others while a generator task yields them;
                None: until the list is full, or the generator has ended.

        Raises:
            DagError: A limit is out of range.
        """
        target = self._target
        chunked = OperatorPartial(
            MapTarget(
                target.operator_class, target.kwargs, chunk=build_chunk(target.owner, target.chunk, max_items, max_wait)
            )
        )
        if (dag := target.kwargs.get("dag")) is not None:
            self.is_expanded = True
            dag.partials.append(chunked)
        return chunked

    @property
    def task_id(self) -> str:
        """The id of the task, without the prefixes of its groups."""
        return str(self._target.kwargs["task_id"])

    def __repr__(self) -> str:
        return f"<{self._target.operator_class.__name__}.partial of task {self.task_id!r} without expand()>"


def make_partial(operator_class: type[BaseOperator], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorPartial:
    """Return an operator with the arguments that all elements share.

    Raises:
        DagError: An argument is unknown, or the operator cannot be mapped.
    """
    owner = name_task(kwargs.get("task_id"))
    if args:
        raise DagError(
            f"{owner}: {operator_class.__name__}.partial() accepts no positional arguments; pass them by name"
        )
    if "task_id" not in kwargs:
        raise DagError(f"{operator_class.__name__}.partial() needs task_id; give the mapped task an id")
    check_names(operator_class, owner, {name: kwargs[name] for name in kwargs.keys() - MAP_OPTIONS}, BaseOperator)
    group = kwargs.get("task_group")
    dag = kwargs.get("dag") or (group.dag if group is not None else None) or open_dags.current
    if dag is None:
        return OperatorPartial(MapTarget(operator_class, kwargs))
    partial = OperatorPartial(
        MapTarget(operator_class, {**kwargs, "dag": dag, "task_group": group or find_open_group(dag)})
    )
    dag.partials.append(partial)
    return partial


def expand(target: MapTarget, args: tuple[Any, ...], sources: Mapping[str, Any]) -> MappedOperator:
    """Create a task that is mapped over the product of its sources; see `OperatorPartial.expand`."""
    owner, call = target.owner, "iterate" if target.iterated else "expand"
    if args:
        raise DagError(f"{owner}: {call}() accepts no positional arguments; pass them by name: {call}(x=[...])")
    if not sources:
        raise DagError(f"{owner}: {call}() needs the arguments to map over: {call}(x=[...])")
    if target.chunk is not None and len(sources) > 1:
        raise DagError(
            f"{owner}: {call}() after chunk() needs one argument, whose values are put into lists; pair the values of "
            f"several: {call}(pairs=a.zip(b))"
        )
    target.check_element(sources, strict=True, call=call)
    read = {name: read_source(owner, name, value, call) for name, value in sources.items()}
    return _create(target, ExpandInput(read))


def expand_kwargs(target: MapTarget, kwargs: Any, strict: bool) -> MappedOperator:
    """Create a task that is mapped over dicts of arguments; see `OperatorPartial.expand_kwargs`."""
    check_bool(target.owner, "strict", strict)
    call = "iterate" if target.iterated else "expand"
    if target.chunk is not None:
        raise DagError(
            f"{target.owner}: {call}_kwargs() after chunk() is not supported, because a list of dicts is not a dict "
            f"of arguments; map over one argument: {call}(rows=...)"
        )
    check = functools.partial(target.check_element, strict=strict, call=f"{call}_kwargs")
    return _create(target, ExpandInput({ALL_ARGUMENTS: read_dicts(target.owner, kwargs, check, call)}, strict))


def iterate(target: MapTarget, args: tuple[Any, ...], sources: Mapping[str, Any]) -> MappedOperator:
    """Create a task whose attempt runs all elements; see `OperatorPartial.iterate`."""
    return expand(_make_iterated(target), args, sources)


def iterate_kwargs(target: MapTarget, kwargs: Any, strict: bool) -> MappedOperator:
    """Create a task whose attempt runs all elements; see `OperatorPartial.iterate_kwargs`."""
    return expand_kwargs(_make_iterated(target), kwargs, strict)


def _make_iterated(target: MapTarget) -> MapTarget:
    """Return a target whose elements run in one attempt.

    Raises:
        DagError: Its elements need attempts of their own.
    """
    cls = target.operator_class
    if callable(getattr(cls, "handle_trigger_events", None)):
        why = "handles a stream, which is deferred"
    elif issubclass(cls, BranchPythonOperator | ShortCircuitOperator):
        why = "skips other tasks"
    else:
        return MapTarget(cls, target.kwargs, target.function, target.chunk, iterated=True)
    raise DagError(
        f"{target.owner}: iterate() runs all elements in one attempt, but {cls.__name__} {why}; use expand()"
    )


def _create(target: MapTarget, expand_input: ExpandInput) -> MappedOperator:
    cls = target.operator_class
    _check_group(target.owner, target)
    _check_mappable(target.owner, target)
    defaults = collect_defaults(target.kwargs)
    names, _ = list_names(cls, BaseOperator)
    base = list_names(BaseOperator, BaseOperator)[0]
    # What an element gives takes precedence over `default_args`, as it does for any task.
    fallbacks = {name: value for name, value in defaults.items() if name in names and name not in expand_input.sources}
    if ALL_ARGUMENTS not in expand_input.sources:
        target.check_complete(expand_input.sources, fallbacks, "expand")
    own = {name: value for name, value in target.kwargs.items() if name in base or name in MAP_OPTIONS}
    shared = {name: value for name, value in target.kwargs.items() if name not in MAP_OPTIONS}
    options = {name: value for name, value in defaults.items() if name in base or name in MAP_OPTIONS}
    return MappedOperator(
        target=MapTarget(cls, shared, target.function, target.chunk, target.iterated),
        expand_input=expand_input,
        fallbacks=fallbacks,
        **{**list_changed_defaults(cls, BaseOperator), **options, **own},
    )


def _check_group(owner: str, target: MapTarget) -> None:
    dag = target.kwargs.get("dag") or open_dags.current
    group = target.kwargs.get("task_group") or (None if dag is None else find_open_group(dag))
    if group is not None and group.mapped_group is not None:
        outer = group.mapped_group
        advice = "return the values of all elements of the group in one list, and map the group over that"
        if outer.kind == "looped":
            advice = "work on all values in one task"
        raise DagError(
            f"{owner}: a mapped task in the {outer.kind} group {outer.group_id!r} is not supported; {advice}"
        )


def _check_mappable(owner: str, target: MapTarget) -> None:
    """Reject functions whose elements would have elements of their own."""
    function = target.kwargs.get("python_callable")
    if function is not None and is_generator(function):
        raise DagError(
            f"{owner}: {'iterate' if target.iterated else 'expand'}() of a generator function is not supported yet: "
            "an element would yield elements of its own; return a list"
        )
