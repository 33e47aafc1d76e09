"""A mapped group: a group of tasks that runs once for each value that it is mapped over.

Invariants: an element of the group is one instance of each of its tasks; inside of the group, a task depends only on
tasks of the same element. Nothing in the group is mapped again. What cannot be decided for each element by itself is
refused when the file is parsed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from tidemill.core.tasks.structure import MapStructure
from tidemill.dags.arguments import suggest
from tidemill.dags.edges import TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.group import GroupCall
from tidemill.dags.map_sources import (
    ALL_ARGUMENTS,
    ExpandInput,
    LiteralItems,
    check_source,
    describe_sources,
)
from tidemill.dags.maps.target import check_limits
from tidemill.dags.operators.python import BranchPythonOperator, ShortCircuitOperator
from tidemill.dags.scope import open_groups
from tidemill.dags.xcom_arg import MISSING, MappedArgument, RunValue, list_outputs

#: Rules that are not met whenever they are met by the tasks outside of the group and by those inside of it.
_JOINT_RULES: Final = frozenset(
    {
        *("all_failed", "all_skipped", "all_done_min_one_success", "none_failed_min_one_success"),
        *("one_success", "one_failed", "one_done"),
    }
)


class MappedTaskGroup(GroupCall):
    """A mapped group; `expand` and `expand_kwargs` of a `@task_group` function create it.

    Args:
        group_id: The id of the group.
        function: The function that creates the tasks.
        expand_input: The sources of the arguments that the group is mapped over.
        shared: The other arguments of the function.
        max_outstanding: How many elements of the group may be unfinished at a time; None: `dags.max_outstanding`.
        max_failed_elements: How many of them may fail before no more are started; None: any number.
        options: Further arguments of `TaskGroup`.

    Attributes:
        source_ids: The ids of the tasks that give the values.

    Raises:
        DagError: An argument is invalid, or the group is inside of another mapped one.
    """

    is_mapped: ClassVar[bool] = True
    #: How messages call such a group.
    kind: ClassVar[str] = "mapped"

    def __init__(
        self,
        group_id: str,
        *,
        function: Callable[..., Any],
        expand_input: ExpandInput,
        shared: Mapping[str, Any],
        max_outstanding: int | None = None,
        max_failed_elements: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(group_id, **options)
        owner = f"group {self.group_id!r}"
        outer = None if self.parent_group is None else self.parent_group.mapped_group
        if outer is not None:
            both = f"{self.kind}, {outer.kind}"
            advice = "map one group over all pairs of values" if both == "mapped, mapped" else "do its work in a task"
            raise DagError(
                f"{owner}: a {self.kind} group in the {outer.kind} group {outer.group_id!r} is not supported; {advice}"
            )
        self.function = function
        self.expand_input = expand_input
        self.shared = dict(shared)
        self.max_outstanding, self.max_failed_elements = check_limits(owner, max_outstanding, max_failed_elements)
        self.factors = describe_sources(owner, expand_input)
        self.source_ids: set[str] = set()
        for name, source in expand_input.sources.items():
            if isinstance(source, RunValue):
                for task in check_source(owner, name, source, self.dag):
                    if task.dag is None:
                        task.dag = self.dag
                    self.source_ids.add(task.task_id)

    @property
    def map_structure(self) -> MapStructure:
        """The structure of the map, as the store keeps it."""
        return MapStructure(
            tuple(self.expand_input.sources), self.factors, self.max_outstanding, self.max_failed_elements
        )

    @cached_property
    def arguments(self) -> dict[str, MappedArgument]:
        """The proxies that the function gets as its mapped arguments."""
        parameters = inspect.signature(self.function).parameters
        names = self.expand_input.sources
        if ALL_ARGUMENTS in names:
            names = {name: None for name in parameters if name not in self.shared}
        defaults = {name: parameters[name].default if name in parameters else MISSING for name in names}
        empty = inspect.Parameter.empty
        return {
            name: MappedArgument(self, name, MISSING if default is empty else default)
            for name, default in defaults.items()
        }

    def check_open(self, argument: MappedArgument) -> None:
        """Check that an argument is used in the function.

        Raises:
            DagError: It is used elsewhere.
        """
        if open_groups.current is None or open_groups.current.mapped_group is not self:
            raise DagError(
                f"group {self.group_id!r}: its argument {argument.name!r} is used outside of the group, where it has "
                "no value; pass the output of a task of the group instead"
            )

    def find_outputs(self, name: str) -> Iterator[TaskNode]:
        """Yield the tasks whose outputs are in the list that an argument is mapped over."""
        yield from self._outputs.get(name, self._outputs.get(ALL_ARGUMENTS, ()))

    @cached_property
    def _outputs(self) -> dict[str, tuple[TaskNode, ...]]:
        found: dict[str, tuple[TaskNode, ...]] = {}
        for name, source in self.expand_input.sources.items():
            if isinstance(source, LiteralItems):
                items = source.items if isinstance(source.items, list | tuple) else ()
                outputs = list_outputs(f"group {self.group_id!r}", name, list(items))
                found[name] = tuple({task.task_id: task for one in outputs for task in one.iter_tasks()}.values())
        return found

    # -- checks of the file --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the group once all tasks and edges of the DAG exist.

        Raises:
            DagError: The group has no tasks, or one of them cannot run in a mapped group.
        """
        tasks = {task.task_id: task for task in self.iter_tasks()}
        if not tasks:
            raise DagError(f"group {self.group_id!r} is mapped, but has no tasks; create them in its function")
        outside = {name for task in tasks.values() for name in task.upstream_task_ids - tasks.keys()}
        between = {name: self.dag.find_relatives(name, upstream=True) & tasks.keys() for name in outside}
        for task in tasks.values():
            owner = f"task {task.task_id!r} of the {self.kind} group {self.group_id!r}"
            if task.handles_streams:
                raise DagError(
                    f"{owner} handles a stream, which is not supported in a {self.kind} group yet; put it before the "
                    "group"
                )
            if task.is_generator:
                _check_used_inside(owner, task, tasks)
            _check_outside(owner, task, between)
            _check_rule(owner, task, tasks)
            _check_edges(owner, task, tasks)


def _check_outside(owner: str, task: Any, between: Mapping[str, Collection[str]]) -> None:
    """Check that no task outside of the group is between two of its tasks: the group could not begin."""
    for name in sorted(task.upstream_task_ids & between.keys()):
        if between[name]:
            raise DagError(
                f"{owner} depends on {name!r} outside of the group, which depends on {min(between[name])!r} of the "
                f"group; move {name!r} into the group, or make two groups"
            )


def _check_used_inside(owner: str, generator: Any, tasks: Mapping[str, Any]) -> None:
    """Check that no task outside of the group takes the values of a generator, which yields them in each element."""
    for name in sorted(generator.downstream_task_ids - tasks.keys()):
        task = generator.dag.task_dict[name]
        for field in () if task.is_mapped else task.template_fields:
            for output in list_outputs(f"task {name!r}", field, getattr(task, field)):
                if generator in output.iter_tasks():
                    raise DagError(
                        f"{owner} yields its values in each element, so task {name!r} outside of the group cannot take "
                        "them; return a list from another task of the group"
                    )


def _check_rule(owner: str, task: Any, tasks: Mapping[str, Any]) -> None:
    inside = sorted(task.upstream_task_ids & tasks.keys())
    outside = sorted(task.upstream_task_ids - tasks.keys())
    if task.trigger_rule == "always" and inside:
        raise DagError(
            f"{owner} depends on {inside[0]!r} of the group, so its trigger_rule cannot be 'always'; use 'all_done'"
        )
    if task.trigger_rule in _JOINT_RULES and inside and outside:
        raise DagError(
            f"{owner} has the trigger_rule {task.trigger_rule!r} over tasks of the group ({inside[0]!r}) and others "
            f"({outside[0]!r}), which is not supported; put an unmapped task with that rule before the group"
        )


def _check_edges(owner: str, task: Any, tasks: Mapping[str, Any]) -> None:
    before = sorted(task.upstream_task_ids - tasks.keys())
    after = sorted(task.downstream_task_ids - tasks.keys())
    if task.is_teardown and before:
        raise DagError(
            f"{owner} is a teardown that directly follows {before[0]!r} outside of the group; create its setup in the "
            "group, or move the teardown out of it"
        )
    if task.is_setup and after:
        raise DagError(
            f"{owner} is a setup that {after[0]!r} outside of the group directly follows; create its teardown in the "
            "group, or move the setup out of it"
        )
    if isinstance(task, BranchPythonOperator | ShortCircuitOperator) and after:
        raise DagError(
            f"{owner} decides about {after[0]!r} outside of the group, which all elements share; decide in an "
            "unmapped task after the group"
        )


def check_names(owner: str, function: Callable[..., Any], names: Sequence[str], call: str) -> None:
    """Check that a function has parameters with these names.

    Raises:
        DagError: It lacks one.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name in names:
        if name not in known:
            advice = suggest(name, known) if known else "it has no parameters"
            raise DagError(f"{owner}: {function.__name__} has no parameter {name!r}, which {call}() gives; {advice}")
