"""Describes how a task starts in a trigger instead of a worker (`start_from_trigger`), when its file is parsed.

The scheduler creates the trigger from this description, and imports nothing of the user's. So the arguments of the
trigger are values that can be stored, and their templates need only values of the run. Invariant: whatever does not
meet this is refused here, with the names of the task and of the argument.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from tidemill.core.errors import describe_error
from tidemill.core.tasks.structure import StartStructure
from tidemill.dags.arguments import check_duration
from tidemill.dags.attempt.continuation import check_continuation
from tidemill.dags.exceptions import DagError
from tidemill.dags.map_sources import ALL_ARGUMENTS, LiteralItems, count_leaves
from tidemill.dags.triggers.start_templates import check_templates, find_templates
from tidemill.dags.triggers.trigger_text import find_trigger_class
from tidemill.dags.xcom_arg import DagParam, MappedArgument, PlainXComArg, list_outputs
from tidemill.runtime.json.codec import encode_sorted
from tidemill.triggers.base import StartTriggerArgs

_MICROSECOND: Final = timedelta(microseconds=1)
_TRIGGER_KWARGS: Final = "trigger_kwargs"
#: The sources of items that need no function.
_PLAIN: Final = (LiteralItems, PlainXComArg, DagParam)
#: Larger arguments of the elements of a map do not fit into the structure of a DAG.
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Start:
    """The checked start of a task or of one element; `names`: the names that its templates use."""

    structure: StartStructure
    names: frozenset[str]


def describe_start(task: Any) -> StartStructure | None:
    """Return how a task starts in a trigger; None if a worker starts it.

    Raises:
        DagError: An argument of the trigger cannot be stored, or is not known when the trigger starts.
    """
    if not task.start_from_trigger:
        return None
    owner = f"task {task.task_id!r}"
    if task.is_generator and not task.feeds_maps:
        raise DagError(f"{owner}: a generator task cannot start in a trigger; set start_from_trigger=False")
    if task.is_mapped and (task.chunking is not None or task.is_iterated):
        call = "iterate" if task.is_iterated else "chunk"
        raise DagError(
            f"{owner}: {call}() with start_from_trigger is not supported, because the values need a worker; set "
            "start_from_trigger=False"
        )
    if task.on_execute_callback:
        raise DagError(
            f"{owner}: on_execute_callback runs before execute, which start_from_trigger skips; remove one of them"
        )
    return (
        _describe_map(owner, task) if task.is_mapped else _describe(owner, task, task, task.make_start_args()).structure
    )


def _describe(owner: str, task: Any, target: Any, args: object) -> _Start:
    """Check the start of a task, or of an element of a mapped one.

    Args:
        owner: The task, for messages.
        task: The task of the DAG.
        target: The operator, or the operator class if the elements of the map are not known.
        args: Its `start_trigger_args`.
    """
    if args is None:
        raise DagError(f"{owner}: start_from_trigger needs start_trigger_args, a StartTriggerArgs; add it")
    if not isinstance(args, StartTriggerArgs):
        raise DagError(f"{owner}: start_trigger_args must be a StartTriggerArgs, got {args!r}")
    classpath = _find_classpath(owner, args.trigger_cls)
    where = f"{owner}: argument {_TRIGGER_KWARGS!r} of start_trigger_args"
    kwargs = _check_kwargs(where, args.trigger_kwargs)
    if not inspect.isclass(target):
        _check_accepted(owner, classpath, kwargs)
    names = _check_names(where, task, kwargs)
    method, method_kwargs = _check_next(owner, target, args)
    timeout = None if args.timeout is None else check_duration(owner, "timeout of start_trigger_args", args.timeout)
    structure = StartStructure(
        classpath,
        _encode(where, _TRIGGER_KWARGS, kwargs),
        method,
        method_kwargs,
        None if timeout is None else timeout // _MICROSECOND,
        _has_templates(kwargs),
        task.dag.render_template_as_native_obj,
        feeds=args.feeds,
        may_be_empty=args.feeds and task.allow_empty_stream,
    )
    return _Start(structure, names)


def _has_templates(kwargs: Any) -> bool:
    return next(find_templates(kwargs), None) is not None


def _check_names(where: str, task: Any, kwargs: Mapping[str, Any]) -> frozenset[str]:
    names = check_templates(where, task.dag, kwargs)
    if "params" in names and task.params:
        raise DagError(
            f"{where} uses params, but params of the task itself are not known there; move them to params of the DAG"
        )
    if "element" in names and not task.is_mapped:
        raise DagError(f"{where} uses 'element', but the task is not mapped; use params, or map it with expand()")
    return names


def _find_classpath(owner: str, trigger_cls: Any) -> str:
    if isinstance(trigger_cls, type):
        trigger_cls = f"{trigger_cls.__module__}.{trigger_cls.__qualname__}"
    if not isinstance(trigger_cls, str) or "." not in trigger_cls:
        raise DagError(
            f"{owner}: trigger_cls of start_trigger_args must be the import path of a trigger class, got "
            f"{trigger_cls!r}"
        )
    try:
        find_trigger_class(trigger_cls, "trigger_cls")
    except DagError as error:
        raise DagError(f"{owner}: start_trigger_args: {error}") from error
    return trigger_cls


def _check_kwargs(where: str, kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise DagError(f"{where} must be a dict with the names of arguments as keys, got {kwargs!r}")
    _check_no_outputs(where, kwargs)
    return dict(kwargs)


def _check_no_outputs(where: str, value: Any) -> None:
    for output in list_outputs(where, _TRIGGER_KWARGS, value):
        if isinstance(output, DagParam):
            raise DagError(f"{where} has a param; write it as a template: '{{{{ params.{output.name} }}}}'")
        if isinstance(output, MappedArgument):
            raise DagError(
                f"{where} has argument {output.name!r} of its mapped group, which is not known there; defer in "
                "execute instead"
            )
        names = ", ".join(repr(task.task_id) for task in output.iter_tasks())
        raise DagError(
            f"{where} has the output of task {names}, which a trigger that starts its task cannot read; map the task "
            "over it with expand(trigger_kwargs=...), or defer in execute"
        )


def _check_accepted(owner: str, classpath: str, kwargs: Mapping[str, Any]) -> None:
    """Check that the constructor of a trigger accepts arguments of these names."""
    try:
        signature = inspect.signature(find_trigger_class(classpath, "trigger_cls"))
    except (TypeError, ValueError):
        return  # the class has no signature, for example because it is written in C
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise DagError(f"{owner}: trigger_kwargs of start_trigger_args do not fit {classpath}: {error}") from None


def _encode(where: str, name: str, value: Any) -> str:
    try:
        return encode_sorted(value, name)
    except ValueError as error:
        raise DagError(f"{where} cannot be stored: {error}; pass plain values, or defer in execute") from error


def _check_next(owner: str, target: Any, args: StartTriggerArgs) -> tuple[str, str]:
    """Return the method that continues, and its encoded arguments."""
    kwargs = _check_kwargs(f"{owner}: argument 'next_kwargs' of start_trigger_args", args.next_kwargs)
    text = _encode(f"{owner}: argument 'next_kwargs' of start_trigger_args", "next_kwargs", kwargs)
    method = args.next_method
    if method is None or method == "":
        return "", text
    if inspect.isclass(target):
        if not callable(getattr(target, method, None)):
            raise DagError(
                f"{owner}: next_method of start_trigger_args is {method!r}, but {target.__name__} has no such method"
            )
        return method, text
    check_continuation(target, method, kwargs)
    return method, text


# -- mapped tasks ------------------------------------------------------------------------------------------------------


def _describe_map(owner: str, task: Any) -> StartStructure | None:
    sources = task.expand_input.sources
    if task.expand_input.is_literal:
        return _describe_elements(owner, task, sources)
    if ALL_ARGUMENTS in sources:
        raise DagError(
            f"{owner}: expand_kwargs() with start_from_trigger needs a list of dicts in the file; use "
            "expand(trigger_kwargs=...)"
        )
    if task.start_trigger_args is None:
        raise DagError(
            f"{owner}: start_from_trigger needs start_trigger_args of the class or of partial(), unless all arguments "
            "of expand() are lists in the file"
        )
    start = _describe(owner, task, task.operator_class, task.start_trigger_args)
    names, rendered, source = start.names, start.structure.rendered, sources.get(_TRIGGER_KWARGS)
    leaf = None if source is None else _find_leaf(owner, sources)
    if source is not None:
        where = f"{owner}: argument {_TRIGGER_KWARGS!r} of expand()"
        items = [_check_kwargs(where, item) for item in source.items] if isinstance(source, LiteralItems) else []
        names = frozenset().union(*(_check_names(where, task, item) for item in items))
        # Values of other tasks are data and no templates.
        rendered = any(map(_has_templates, items))
    if "element" in names and not all(
        isinstance(one, LiteralItems | PlainXComArg | DagParam) for one in sources.values()
    ):
        raise DagError(
            f"{owner}: the templates of trigger_kwargs use 'element', but expand() uses map() or zip(), which a worker "
            "would have to evaluate; map over the output of a task"
        )
    found = () if leaf is None and "element" not in names else _encode_items(owner, sources)
    return replace(start.structure, rendered=rendered, leaf=leaf, items=found)


def _find_leaf(owner: str, sources: Mapping[str, Any]) -> int:
    """Return the position of the source of `trigger_kwargs` among the leaves of a map."""
    source = sources[_TRIGGER_KWARGS]
    if not isinstance(source, _PLAIN):
        raise DagError(
            f"{owner}: argument {_TRIGGER_KWARGS!r} of expand() uses map() or zip(), which a worker would have to "
            "evaluate; return the dicts from a task, and map over its output"
        )
    names = list(sources)
    return sum(count_leaves(sources[name]) for name in names[: names.index(_TRIGGER_KWARGS)])


def _describe_elements(owner: str, task: Any, sources: Mapping[str, Any]) -> StartStructure | None:
    """Return how the elements of a map over literal values start; None if there are none."""
    found: list[_Start] = []
    size_bytes = 0
    for values in itertools.product(*(source.items for source in sources.values())):
        given = dict(zip(sources, values, strict=True))
        name = f"{owner}, element {len(found)}"
        try:
            operator = task.unmap(given.get(ALL_ARGUMENTS, given))
            args = operator.make_start_args()
        except DagError:
            raise
        except Exception as error:
            raise DagError(f"{name}: {task.task_type} rejected its arguments: {describe_error(error)}") from error
        found.append(_describe(name, task, operator, args))
        size_bytes += len(found[-1].structure.kwargs)
        if size_bytes > MAX_BYTES:
            raise DagError(
                f"{owner}: the trigger_kwargs of its elements take more than {MAX_BYTES:,} bytes; return them from a "
                "task, and map over its output"
            )
    if not found:
        return None
    first = replace(found[0].structure, rendered=any(one.structure.rendered for one in found))
    elements = tuple(one.structure.kwargs for one in found)
    _check_alike(owner, [one.structure for one in found])
    uses_element = any("element" in one.names for one in found)
    return replace(
        first,
        elements=() if len(set(elements)) == 1 else elements,
        items=_encode_items(owner, sources) if uses_element else (),
    )


def _check_alike(owner: str, found: Sequence[StartStructure]) -> None:
    first = found[0]
    for index, one in enumerate(found):
        for name, field in (
            ("trigger_cls", "classpath"),
            ("next_method", "method"),
            ("next_kwargs", "method_kwargs"),
            ("timeout", "timeout_us"),
        ):
            if getattr(one, field) != getattr(first, field):
                raise DagError(
                    f"{owner}: {name} of start_trigger_args differs between the elements 0 and {index}; only "
                    "trigger_kwargs may differ"
                )


def _encode_items(owner: str, sources: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the encoded items of each leaf of a map; none for a leaf whose items are values of other tasks.

    Raises:
        DagError: An item cannot be stored, or is the result of a function.
    """
    found: list[tuple[str, ...]] = []
    for name, source in sources.items():
        where = f"{owner}: argument {name!r} of expand()"
        if isinstance(source, LiteralItems):
            found.append(tuple(_encode(where, f"{name}[{index}]", item) for index, item in enumerate(source.items)))
        else:
            found += [()] * count_leaves(source)
    return tuple(found)
