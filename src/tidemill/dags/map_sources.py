"""What a task is mapped over: the arguments of `expand` and `expand_kwargs`.

Each argument is a factor. A factor is a tree: its leaves are literal values, task outputs and params; above them are
the functions of `.map` and the pairs of `.zip`. The scheduler numbers the elements from the tree that `describe_source`
returns, which has no functions. An attempt gets one item for each leaf, depth first, and `evaluate` applies the tree to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from tidemill.core.tasks.structure import MapSource
from tidemill.dags.edges import Node
from tidemill.dags.exceptions import DagError, TaskError, TaskFailed
from tidemill.dags.group import GroupOutput
from tidemill.dags.xcom_arg import (
    MISSING,
    RETURN_VALUE,
    DagParam,
    MapXComArg,
    PlainXComArg,
    RunValue,
    RunValues,
    XComArg,
    ZipXComArg,
)
from tidemill.runtime.json.codec import decode

#: The name of the only factor of `expand_kwargs`.
ALL_ARGUMENTS: Final = "**"


@dataclass(frozen=True, slots=True)
class LiteralItems:
    """Values in the DAG's file.

    Attributes:
        items: The values; for a dict, pairs of key and value.
    """

    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class LeafItem:
    """The item that a leaf gives to an element.

    Attributes:
        index: The index of the item in its source; -1: the source is a part of a `zip` that has ended.
        text: The encoded item; None for a literal, and for a part that has ended.
    """

    index: int
    text: str | None


@dataclass(frozen=True, slots=True)
class ExpandInput:
    """What a task is mapped over.

    Attributes:
        sources: The root of the tree of each factor, by argument; for `expand_kwargs` the only one is `**`.
        strict: Whether an element may not give an argument that `partial` has given.
    """

    sources: Mapping[str, Any]
    strict: bool = True

    @property
    def is_literal(self) -> bool:
        """Whether all values are in the file."""
        return all(isinstance(source, LiteralItems) for source in self.sources.values())

    @property
    def has_literals(self) -> bool:
        """Whether some values are in the file."""
        return any(isinstance(source, LiteralItems) for source in self.sources.values())

    @property
    def is_kwargs(self) -> bool:
        """Whether the values are dicts of arguments."""
        return ALL_ARGUMENTS in self.sources

    def evaluate(self, leaves: Sequence[LeafItem], values: RunValues) -> tuple[dict[str, Any], Any]:
        """Return the arguments of an element, and the part of their values that is data instead of templates.

        Raises:
            TaskFailed: An item of `expand_kwargs` is not a dict of arguments.
            TaskError: The file was changed after the run began.
            Exception: An exception of a function of `.map`.
        """
        if len(leaves) != sum(count_leaves(source) for source in self.sources.values()):
            raise TaskError(
                "the arguments of expand() have other sources than when the run began; clear the task, or start a new "
                "run"
            )
        left = iter(leaves)
        found = {name: evaluate(name, source, left) for name, source in self.sources.items()}
        data = [value for name, value in found.items() if not isinstance(self.sources[name], LiteralItems)]
        if ALL_ARGUMENTS not in found:
            return found, data
        item = found[ALL_ARGUMENTS]
        if isinstance(item, RunValue):
            item = item.resolve(values)
            data = [item]
        if not isinstance(item, Mapping) or not all(isinstance(key, str) for key in item):
            raise TaskFailed(
                f"expand_kwargs() needs dicts with the names of arguments as keys; this element has {item!r}"
            )
        return dict(item), data


def read_source(owner: str, name: str, value: Any, call: str = "expand") -> Any:
    """Return an argument of `expand` or `iterate` (`call`) as the root of its tree.

    Raises:
        DagError: The argument is no sequence; the message says what to pass instead.
    """
    if isinstance(value, GroupOutput):
        value = value.value
    if isinstance(value, Mapping):
        return LiteralItems(tuple(value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return LiteralItems(value)
    if isinstance(value, RunValue):
        return value
    raise DagError(f"{owner}: argument {name!r} of {call}() is {_explain(value)}")


def _explain(value: Any) -> str:
    if isinstance(value, Node):
        return f"{value!r}; pass the output of a task: `.output`"
    if isinstance(value, str | bytes | bytearray):
        return "a single text; pass a list of texts, or give the argument in partial()"
    if isinstance(value, Set):
        return "a set, whose order changes; pass sorted(...)"
    if isinstance(value, Iterator):
        return "an iterator, which can be read only once; pass list(...), or make it a @task that yields"
    return (
        f"of type {type(value).__name__}, not a sequence; pass a list, a dict, a param or the output of a task, "
        "or give the argument in partial()"
    )


def read_dicts(owner: str, kwargs: Any, check: Callable[[Mapping[str, Any]], None], call: str = "expand") -> Any:
    """Return the argument of `expand_kwargs` or `iterate_kwargs` as the root of its tree.

    Args:
        owner: The task or group, for messages.
        kwargs: The argument.
        check: Checks the names in a dict.
        call: `expand` or `iterate`.

    Raises:
        DagError: The argument is not a list of dicts.
    """
    kwargs = kwargs.value if isinstance(kwargs, GroupOutput) else kwargs
    if isinstance(kwargs, XComArg | DagParam):
        return kwargs
    if not isinstance(kwargs, Sequence) or isinstance(kwargs, str | bytes | bytearray):
        raise DagError(
            f"{owner}: {call}_kwargs() needs a list of dicts, a param or the output of a task, got "
            f"{type(kwargs).__name__}; for one list per argument use {call}()"
        )
    for number, item in enumerate(kwargs):
        if isinstance(item, XComArg):
            continue
        if not isinstance(item, Mapping) or not all(isinstance(key, str) for key in item):
            raise DagError(
                f"{owner}: {call}_kwargs() needs dicts with the names of arguments as keys; item {number} is {item!r}"
            )
        check(item)
    return LiteralItems(kwargs)


def check_source(owner: str, name: str, source: RunValue, dag: Any) -> list[Any]:
    """Return the tasks of a source.

    Raises:
        DagError: One of them belongs to another DAG, or a param has a default that cannot be mapped over.
    """
    tasks: list[Any] = list(source.iter_tasks())
    for task in tasks:
        if task.dag is not None and dag is not None and task.dag is not dag:
            raise DagError(
                f"{owner}: argument {name!r} of expand() is the output of task {task.task_id!r} of DAG "
                f"{task.dag.dag_id!r}; read it in a @task of this DAG with xcom_pull(dag_id=...), and map over that"
            )
    if isinstance(source, DagParam) and dag is not None and source.name in dag.params:
        param = dag.params[source.name]
        if param.has_default and param.default is not None:
            read_source(owner, name, param.default)
    return tasks


def describe_sources(owner: str, expand_input: ExpandInput) -> tuple[MapSource, ...]:
    """Return the structures of all factors.

    Raises:
        DagError: A factor is mapped over something that is not supported, or two are the values of generators.
    """
    names = list(expand_input.sources)
    factors = tuple(describe_source(owner, name, source) for name, source in expand_input.sources.items())
    found = [name for name, factor in zip(names, factors, strict=True) if factor.kind == "generator"]
    if len(found) > 1:
        raise DagError(
            f"{owner}: the arguments {found[0]!r} and {found[1]!r} of expand() are both the output of a generator "
            "task; only one of them may be: return a list in the other task"
        )
    return factors


def describe_source(owner: str, name: str, source: Any) -> MapSource:
    """Return the structure of a factor's tree.

    Raises:
        DagError: The factor is mapped over something that is not supported.
    """
    where = f"{owner}: argument {name!r} of expand()"
    if isinstance(source, LiteralItems):
        return MapSource("literal", length=len(source.items))
    if isinstance(source, DagParam):
        return MapSource("param", key=source.name)
    if isinstance(source, MapXComArg):
        return describe_source(owner, name, source.arg)
    if isinstance(source, ZipXComArg):
        parts = tuple(describe_source(owner, name, part) for part in source.args)
        leaves = [leaf for part in parts for leaf in part.leaves]
        if any(leaf.kind == "generator" for leaf in leaves):
            raise DagError(
                f"{where} pairs the values of a generator task with zip(), but their number is not known before the "
                "task has ended; pair them in the generator, or return a list instead"
            )
        if any(leaf.has_gaps for leaf in leaves) and any(part.kind == "zip" for part in parts):
            raise DagError(
                f"{where} pairs the results of a mapped task with pairs of zip(); write one zip() of all: a.zip(b, c)"
            )
        return MapSource("zip", parts=parts, fills=source.fillvalue is not MISSING)
    if isinstance(source, PlainXComArg):
        return _describe_output(where, source)
    raise DagError(f"{where} is {source!r}, which cannot be mapped over; pass a list, a param or the output of a task")


def _describe_output(where: str, source: PlainXComArg) -> MapSource:
    task = source.operator
    if source.key == RETURN_VALUE and not task.do_xcom_push:
        raise DagError(
            f"{where} is the output of task {task.task_id!r}, which stores none; remove do_xcom_push=False from that "
            "task"
        )
    is_open = task.is_generator and source.key == RETURN_VALUE
    if is_open and task.has_elements:
        raise DagError(
            f"{where} is the output of task {task.task_id!r}, which yields its values in each element of its mapped "
            "group; return a list from another task of the group"
        )
    if getattr(task, "is_iterated", False):
        return MapSource("results", task.task_id, source.key)
    kind = "map" if task.has_elements else "generator" if is_open else "xcom"
    return MapSource(kind, task.task_id, source.key)


def count_leaves(source: Any) -> int:
    """Return the number of leaves of a tree."""
    if isinstance(source, MapXComArg):
        return count_leaves(source.arg)
    if isinstance(source, ZipXComArg):
        return sum(count_leaves(part) for part in source.args)
    return 1


def evaluate(name: str, source: Any, leaves: Iterator[LeafItem]) -> Any:
    """Return the value that a factor gives to an element.

    Args:
        name: The argument, for messages.
        source: The root of the factor's tree.
        leaves: The items of the leaves, of which this takes those of the factor.

    Raises:
        TaskError: The file no longer has a value for the element.
        Exception: An exception of a function of `.map`.
    """
    found = _evaluate(source, leaves)
    if found is MISSING:
        raise TaskError(
            f"argument {name!r} of expand() no longer has a value for this element; its file was changed after the run "
            "began: clear the task, or start a new run"
        )
    return found


def _evaluate(source: Any, leaves: Iterator[LeafItem], *, paired: bool = False) -> Any:
    """Return the value of a source; MISSING: there is none. `paired`: it is a part of a zip, which may fill it."""
    if isinstance(source, MapXComArg):
        item = _evaluate(source.arg, leaves, paired=paired)
        return MISSING if item is MISSING else source.apply(item)
    if isinstance(source, ZipXComArg):
        return source.join([_evaluate(part, leaves, paired=True) for part in source.args])
    leaf = next(leaves)
    if isinstance(source, LiteralItems):
        return source.items[leaf.index] if 0 <= leaf.index < len(source.items) else MISSING
    if leaf.text is not None:
        return decode(leaf.text)
    if not paired and isinstance(source, PlainXComArg) and source.operator.has_elements:
        raise TaskError(
            f"element {leaf.index} of task {source.operator.task_id!r} has no result now: it was cleared, and has not "
            "succeeded again; clear this element once it has"
        )
    return MISSING
