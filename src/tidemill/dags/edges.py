"""Dependencies between tasks: `a >> b`, `[a, b] >> c`, `chain`, `cross_downstream`, and labels on edges.

Tasks, groups and task outputs are nodes. An edge between two nodes is expanded at once to edges between tasks: from
each leaf of the first node to each root of the second.

Invariant: both tasks of an edge store it, and both belong to the same DAG.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar, Union

from tidemill.dags.exceptions import DagError


class Node(abc.ABC):
    """A node of the graph: a task, a group, a task output or a label."""

    @abc.abstractmethod
    def find_roots(self) -> Sequence[TaskNode]:
        """Return the first tasks of the node."""

    @abc.abstractmethod
    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the last tasks of the node."""

    def set_downstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Make `other` depend on this node; the same as `self >> other`."""
        _join([self], other, edge_modifier)

    def set_upstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Make this node depend on `other`; the same as `self << other`."""
        _join(other, [self], edge_modifier)

    def __rshift__(self, other: NodesT) -> NodesT:
        """Make others depend on this node: `a >> b`, `a >> [b, c]`."""
        self.set_downstream(other)
        return other

    def __lshift__(self, other: NodesT) -> NodesT:
        """Make this node depend on others: `a << b`."""
        self.set_upstream(other)
        return other

    def __rrshift__(self, other: Nodes) -> Self:
        """Make this node depend on each node of a list: `[a, b] >> c`."""
        self.set_upstream(other)
        return self

    def __rlshift__(self, other: Nodes) -> Self:
        """Make each node of a list depend on this node: `[a, b] << c`."""
        self.set_downstream(other)
        return self


class TaskNode(Node):
    """The edges of a task.

    Attributes:
        task_id: The id of the task, prefixed with the ids of its groups.
        upstream_task_ids: The ids of the direct upstream tasks.
        downstream_task_ids: The ids of the direct downstream tasks.
    """

    task_id: str
    upstream_task_ids: set[str]
    downstream_task_ids: set[str]

    @property
    @abc.abstractmethod
    def dag(self) -> Any:
        """The DAG of the task; None if it has none yet."""

    @dag.setter
    def dag(self, dag: Any) -> None: ...

    def find_roots(self) -> Sequence[TaskNode]:
        return (self,)

    def find_leaves(self) -> Sequence[TaskNode]:
        return (self,)


class EdgeModifier(Node):
    """A label for the edges between its two sides: `a >> Label("when it rains") >> b`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._upstream: list[Any] = []
        self._downstream: list[Any] = []

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the first tasks downstream of the label."""
        return _flatten(self._downstream, leaves=False)

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the last tasks upstream of the label."""
        return _flatten(self._upstream, leaves=True)

    def set_upstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Connect the nodes on the upstream side with those on the downstream side."""
        added = _listed(other)
        self._upstream += added
        _join(added, self._downstream, self)

    def set_downstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Connect the nodes on the downstream side with those on the upstream side."""
        added = _listed(other)
        self._downstream += added
        _join(self._upstream, added, self)


# `|` with quoted names is an error at run time before Python 3.14.
Nodes = Union[Node, Sequence[Any]]  # noqa: UP007
NodesT = TypeVar("NodesT", bound=Nodes)


def Label(label: str) -> EdgeModifier:
    """Return a label for edges.

    Args:
        label: The text to show on the edges.
    """
    return EdgeModifier(label)


def chain(*nodes: Nodes) -> None:
    """Make each node depend on the one before: `chain(a, [b, c], [d, e], f)`. Adjacent lists are joined pairwise.

    Raises:
        DagError: Two adjacent lists differ in length.
    """
    for before, after in pairwise(nodes):
        if isinstance(before, Node) or isinstance(after, Node):
            _join(before, after, None)
            continue
        if len(before) != len(after):
            raise DagError(
                f"chain: adjacent lists have {len(before)} and {len(after)} tasks; give both the same length, or use "
                "cross_downstream for edges from each task to each"
            )
        for one, other in zip(before, after, strict=True):
            _join(one, other, None)


def chain_linear(*nodes: Nodes) -> None:
    """Make each node, or each node of a list, depend on all nodes of the argument before it."""
    for before, after in pairwise(nodes):
        _join(before, after, None)


def cross_downstream(from_tasks: Sequence[Any], to_tasks: Nodes) -> None:
    """Make each of `to_tasks` depend on each of `from_tasks`."""
    _join(from_tasks, to_tasks, None)


def connect(before: TaskNode, after: TaskNode, label: str = "") -> None:
    """Make `after` depend on `before`.

    Raises:
        DagError: The tasks belong to different DAGs, or are the same task.
    """
    if before is after:
        raise DagError(f"task {before.task_id!r} cannot depend on itself; remove the edge")
    if before.dag is None and after.dag is not None:
        before.dag = after.dag
    elif after.dag is None and before.dag is not None:
        after.dag = before.dag
    if before.dag is not after.dag:
        raise DagError(
            f"task {after.task_id!r} of DAG {after.dag.dag_id!r} cannot depend on task {before.task_id!r} of DAG "
            f"{before.dag.dag_id!r}; connect tasks of the same DAG only"
        )
    before.downstream_task_ids.add(after.task_id)
    after.upstream_task_ids.add(before.task_id)
    if label and before.dag is not None:
        before.dag.edge_labels[before.task_id, after.task_id] = label


def _join(before: Nodes, after: Nodes, modifier: EdgeModifier | None) -> None:
    if isinstance(before, EdgeModifier) or isinstance(after, EdgeModifier):
        _join_modifier(before, after)
        return
    lasts = _flatten(_listed(before), leaves=True)
    firsts = _flatten(_listed(after), leaves=False)
    for one in lasts:
        for other in firsts:
            connect(one, other, modifier.label if modifier else "")


def _join_modifier(before: Nodes, after: Nodes) -> None:
    if isinstance(after, EdgeModifier):
        after.set_upstream(before)
    else:
        assert isinstance(before, EdgeModifier)
        before.set_downstream(after)


def _listed(nodes: Nodes) -> list[Any]:
    return list(nodes) if isinstance(nodes, list | tuple | set | frozenset) else [nodes]


def _flatten(nodes: Iterable[Any], *, leaves: bool) -> list[TaskNode]:
    found: dict[int, TaskNode] = {}
    for node in nodes:
        if isinstance(node, list | tuple | set | frozenset):
            tasks: Sequence[TaskNode] = _flatten(node, leaves=leaves)
        elif isinstance(node, Node):
            tasks = node.find_leaves() if leaves else node.find_roots()
        else:
            raise DagError(
                f"{node!r} of type {type(node).__name__} cannot have edges; use a task, a group, or the output of a "
                "@task function"
            )
        found.update((id(task), task) for task in tasks)
    return list(found.values())
