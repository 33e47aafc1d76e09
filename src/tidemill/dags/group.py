"""Groups of tasks: what people see folded together, and what edges can be drawn to and from as a whole.

Groups exist for people and for edges alone: when a DAG runs there are only tasks.

Invariant: the ids of tasks and groups of a DAG are different.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from tidemill.dags.arguments import check_bool, check_id, check_text
from tidemill.dags.edges import Node, TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.scope import open_dags, open_groups


class TaskGroup(Node):
    """A group of tasks; tasks created inside `with TaskGroup(...)` are in it.

    Args:
        group_id: Its id; None: that of the DAG itself, which has no id.
        prefix_group_id: Whether the ids of its tasks and groups begin with its own.
        parent_group: The group that it is in; by default the one that is open.
        dag: The DAG; by default the one that is open.
        default_args: Arguments of its tasks that do not have them, over those of the DAG.
        tooltip: What it is, for people.
        group_display_name: What people see instead of its id.
        add_suffix_on_collision: Whether a number is added to an id that exists; otherwise that is an error.
    """

    def __init__(
        self,
        group_id: str | None,
        prefix_group_id: bool = True,
        parent_group: TaskGroup | None = None,
        dag: Any = None,
        default_args: Mapping[str, Any] | None = None,
        tooltip: str = "",
        group_display_name: str = "",
        add_suffix_on_collision: bool = False,
    ) -> None:
        """Join its DAG, and the group that it is in."""
        self.children: dict[str, Any] = {}
        self.prefix_group_id = prefix_group_id
        self.default_args = dict(default_args or {})
        self.parent_group = parent_group
        self.group_id = ""
        if group_id is None:
            self.dag = dag
            return
        self.dag = dag or (parent_group.dag if parent_group else open_dags.current)
        if self.dag is None:
            raise DagError(f"group {group_id!r} is in no DAG; create it inside `with DAG(...)`, or give dag=")
        if self.parent_group is None:
            self.parent_group = find_open_group(self.dag)
        check_id("group_id", group_id)
        owner = f"group {group_id!r}"
        check_bool(owner, "prefix_group_id", prefix_group_id)
        self.tooltip = check_text(owner, "tooltip", tooltip, empty=True)
        self.group_display_name = check_text(owner, "group_display_name", group_display_name, empty=True)
        self.group_id = self.dag.reserve_id(self.parent_group.prefix_id(group_id), suffix=add_suffix_on_collision)
        self._label = group_id
        self.parent_group.children[self.group_id] = self
        self.dag.groups[self.group_id] = self

    @property
    def label(self) -> str:
        """What people see: its display name, or its id without those of the groups around it."""
        return self.group_display_name or self._label

    @property
    def all_default_args(self) -> dict[str, Any]:
        """The arguments of the groups around it, and its own over them."""
        outer = self.parent_group.all_default_args if self.parent_group else {}
        return {**outer, **self.default_args}

    def prefix_id(self, name: str) -> str:
        """Return the id that a task or group of this name has in this group."""
        return f"{self.group_id}.{name}" if self.prefix_group_id and self.group_id else name

    def iter_tasks(self) -> Iterator[Any]:
        """Yield the tasks in it, and in the groups in it."""
        for child in self.children.values():
            if isinstance(child, TaskGroup):
                yield from child.iter_tasks()
            else:
                yield child

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks that come after no other of the group."""
        tasks = list(self.iter_tasks())
        ids = {task.task_id for task in tasks}
        return [task for task in tasks if task.upstream_task_ids.isdisjoint(ids)]

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks that no other of the group comes after; instead of teardowns, those before them."""
        tasks = {task.task_id: task for task in self.iter_tasks()}
        leaves: dict[str, TaskNode] = {}
        for task in tasks.values():
            if task.downstream_task_ids.isdisjoint(tasks):
                leaves.update(_skip_teardowns(task, tasks))
        return list(leaves.values())

    def __enter__(self) -> TaskGroup:
        """Open it: tasks created from now on are in it."""
        open_groups.push(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        open_groups.pop()

    def __repr__(self) -> str:
        """Show its id."""
        return f"<TaskGroup {self.group_id!r}>"


def find_open_group(dag: Any) -> TaskGroup:
    """Return the innermost group of a DAG that is open; otherwise the DAG's own."""
    group = open_groups.current
    found: TaskGroup = group if group is not None and group.dag is dag else dag.task_group
    return found


def _skip_teardowns(task: Any, tasks: dict[str, Any]) -> dict[str, TaskNode]:
    """Return a task, or for a teardown what comes before it: nothing outside waits for a teardown."""
    if not task.is_teardown:
        return {task.task_id: task}
    found: dict[str, TaskNode] = {}
    for before in (tasks[name] for name in sorted(task.upstream_task_ids & tasks.keys())):
        if before.is_teardown:
            found.update(_skip_teardowns(before, tasks))
            continue
        after = (before.downstream_task_ids & tasks.keys()) - {task.task_id}
        if not before.is_setup and all(tasks[name].is_teardown for name in after):
            found[before.task_id] = before
    return found


class GroupCall(TaskGroup):
    """A group that a `@task_group` function has filled; `output`: what the function returned."""

    output: Any = None


@overload
def task_group(function: Callable[..., Any], /) -> Callable[..., Any]: ...
@overload
def task_group(
    function: None = None, /, *, group_id: str | None = None, **arguments: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def task_group(function: Any = None, /, *, group_id: str | None = None, **arguments: Any) -> Any:
    """Turn a function that creates tasks into one that creates a group with them each time it is called.

    The call returns what the function returned, if that is the output of a task or a group of them; otherwise the
    group, so that edges can be drawn to it.

    Args:
        function: The function.
        group_id: The id of the group; by default the name of the function. A number is added if it exists.
        arguments: More arguments of `TaskGroup`.
    """
    if function is None:
        return functools.partial(_decorate, group_id=group_id, arguments=arguments)
    return _decorate(function, group_id=group_id, arguments=arguments)


def _decorate(function: Callable[..., Any], *, group_id: str | None, arguments: dict[str, Any]) -> Any:
    name = group_id or function.__name__
    shown = {"tooltip": (inspect.getdoc(function) or "").partition("\n")[0], "add_suffix_on_collision": True}

    def create(changed: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {**shown, **arguments, **changed}
        group = GroupCall(options.pop("group_id", name), **options)
        with group:
            group.output = function(*args, **kwargs)
        # Edges are drawn to all of the group; what it returns is passed on to tasks.
        return GroupOutput(group) if isinstance(group.output, Node | dict | list | tuple) else group

    return _GroupFunction(function, create)


class _GroupFunction:
    """A `@task_group` function."""

    def __init__(self, function: Callable[..., Any], create: Callable[..., Any], **changed: Any) -> None:
        self._create = create
        self._changed = changed
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Create a group."""
        return self._create(self._changed, args, kwargs)

    def override(self, **arguments: Any) -> _GroupFunction:
        """Return the same with other arguments of the group."""
        return _GroupFunction(self.function, self._create, **{**self._changed, **arguments})


class GroupOutput(Node):
    """What a `@task_group` function returned, which stands for the whole group in edges."""

    def __init__(self, group: GroupCall) -> None:
        """Keep the group."""
        self.group = group

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the first tasks of the group."""
        return self.group.find_roots()

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the last tasks of the group."""
        return self.group.find_leaves()

    @property
    def value(self) -> Any:
        """What the function returned, to be passed to tasks."""
        return self.group.output

    def __getitem__(self, key: Any) -> Any:
        """Return a part of what the function returned."""
        return self.value[key]
