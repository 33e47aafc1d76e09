"""Groups of tasks: folded together in the UI, and connected as a whole by edges.

Groups exist only while a DAG is built and displayed; at run time there are only tasks. A mapped group is the exception:
it runs once for each of its values (`tidemill.dags.maps.mapped_group`).

Invariant: ids are unique across the tasks and groups of a DAG.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tidemill.dags.arguments import check_bool, check_id, check_text
from tidemill.dags.edges import Node, TaskNode
from tidemill.dags.exceptions import DagError
from tidemill.dags.scope import open_dags, open_groups


class TaskGroup(Node):
    """A group of tasks; tasks created inside `with TaskGroup(...)` belong to it.

    Args:
        group_id: The id of the group; None for the root group of a DAG.
        prefix_group_id: Whether the ids of the group's tasks and groups start with the id of the group.
        parent_group: The enclosing group; by default the one that is open.
        dag: The DAG; by default the one that is open.
        default_args: Default arguments for the group's tasks; they override the DAG's arguments.
        tooltip: A short description for people.
        group_display_name: The name to show instead of the id.
        add_suffix_on_collision: Whether to append a number to an id that is in use, instead of raising an error.
    """

    #: Whether the group itself is mapped, as opposed to a group inside of it.
    is_mapped: ClassVar[bool] = False

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
            raise DagError(
                f"group {group_id!r} does not belong to a DAG; create it inside `with DAG(...)`, or pass dag="
            )
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
        """The name to show: the display name, or the id without the prefixes of enclosing groups."""
        return self.group_display_name or self._label

    @property
    def all_default_args(self) -> dict[str, Any]:
        """The default arguments of this group and its enclosing groups; inner groups override outer ones."""
        outer = self.parent_group.all_default_args if self.parent_group else {}
        return {**outer, **self.default_args}

    @property
    def mapped_group(self) -> Any:
        """The `MappedTaskGroup` that this group is or belongs to; None: there is none."""
        return self if self.is_mapped else self.parent_group.mapped_group if self.parent_group else None

    def prefix_id(self, name: str) -> str:
        """Return the full id of a task or group with this name in this group."""
        return f"{self.group_id}.{name}" if self.prefix_group_id and self.group_id else name

    def iter_tasks(self) -> Iterator[Any]:
        """Yield the tasks of this group and of all nested groups."""
        for child in self.children.values():
            if isinstance(child, TaskGroup):
                yield from child.iter_tasks()
            else:
                yield child

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks without upstream tasks in the group."""
        tasks = list(self.iter_tasks())
        ids = {task.task_id for task in tasks}
        return [task for task in tasks if task.upstream_task_ids.isdisjoint(ids)]

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks without downstream tasks in the group; teardowns are replaced by the tasks before them."""
        tasks = {task.task_id: task for task in self.iter_tasks()}
        leaves: dict[str, TaskNode] = {}
        for task in tasks.values():
            if task.downstream_task_ids.isdisjoint(tasks):
                leaves.update(_skip_teardowns(task, tasks))
        return list(leaves.values())

    def __enter__(self) -> TaskGroup:
        """Open the group: tasks created inside the block belong to it."""
        open_groups.push(self)
        return self

    def __exit__(self, *_: object) -> None:
        open_groups.pop()

    def __repr__(self) -> str:
        return f"<TaskGroup {self.group_id!r}>"


def find_open_group(dag: Any) -> TaskGroup:
    """Return the innermost open group of a DAG, or else the DAG's root group."""
    group = open_groups.current
    found: TaskGroup = group if group is not None and group.dag is dag else dag.task_group
    return found


def _skip_teardowns(task: Any, tasks: dict[str, Any]) -> dict[str, TaskNode]:
    """Return the task, or for a teardown the tasks before it: nothing outside a group waits for its teardowns."""
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
    """A group filled by a `@task_group` function; `output` is the function's return value."""

    output: Any = None


class GroupOutput(Node):
    """The return value of a `@task_group` function; in edges it stands for the whole group."""

    def __init__(self, group: GroupCall) -> None:
        self.group = group

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the first tasks of the group."""
        return self.group.find_roots()

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the last tasks of the group."""
        return self.group.find_leaves()

    @property
    def value(self) -> Any:
        """The function's return value, to pass to tasks."""
        return self.group.output

    def __getitem__(self, key: Any) -> Any:
        """Return an item of the function's return value."""
        return self.value[key]
