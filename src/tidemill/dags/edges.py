"""What stands before what: `a >> b`, `[a, b] >> c`, `chain`, `cross_downstream`, and labels on edges.

Tasks, groups and outputs of tasks are nodes. An edge between nodes becomes edges between tasks at once: from the leaves
of the one to the roots of the other.

Invariant: an edge is kept by both of its tasks, and they are of the same DAG.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar, Union

from tidemill.dags.exceptions import DagError


class Node(abc.ABC):
    """Something that can stand before and after others in a DAG."""

    @abc.abstractmethod
    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks of it that come first."""

    @abc.abstractmethod
    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks of it that come last."""

    def set_downstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Let other nodes come after this one, like `self >> other`."""
        _join([self], other, edge_modifier)

    def set_upstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Let other nodes come before this one, like `self << other`."""
        _join(other, [self], edge_modifier)

    def __rshift__(self, other: NodesT) -> NodesT:
        """Let others come after this one: `a >> b`, `a >> [b, c]`."""
        self.set_downstream(other)
        return other

    def __lshift__(self, other: NodesT) -> NodesT:
        """Let others come before this one: `a << b`."""
        self.set_upstream(other)
        return other

    def __rrshift__(self, other: Nodes) -> Self:
        """Let this one come after those of a list: `[a, b] >> c`."""
        self.set_upstream(other)
        return self

    def __rlshift__(self, other: Nodes) -> Self:
        """Let this one come before those of a list: `[a, b] << c`."""
        self.set_downstream(other)
        return self


class TaskNode(Node):
    """A task, as far as its edges are concerned.

    Attributes:
        task_id: Its id, with those of its groups in front.
        upstream_task_ids: The tasks directly before it.
        downstream_task_ids: The tasks directly after it.
    """

    task_id: str
    upstream_task_ids: set[str]
    downstream_task_ids: set[str]

    @property
    @abc.abstractmethod
    def dag(self) -> Any:
        """Its DAG; None: it has none yet."""

    @dag.setter
    def dag(self, dag: Any) -> None: ...

    def find_roots(self) -> Sequence[TaskNode]:
        """Return itself."""
        return (self,)

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return itself."""
        return (self,)


class EdgeModifier(Node):
    """A label on the edges that it stands on: `a >> Label("when it rains") >> b`."""

    def __init__(self, label: str) -> None:
        """Wait for both sides."""
        self.label = label
        self._upstream: list[Any] = []
        self._downstream: list[Any] = []

    def find_roots(self) -> Sequence[TaskNode]:
        """Return the tasks after it."""
        return _flatten(self._downstream, leaves=False)

    def find_leaves(self) -> Sequence[TaskNode]:
        """Return the tasks before it."""
        return _flatten(self._upstream, leaves=True)

    def set_upstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Let it come after others."""
        added = _listed(other)
        self._upstream += added
        _join(added, self._downstream, self)

    def set_downstream(self, other: Nodes, edge_modifier: EdgeModifier | None = None) -> None:
        """Let it come before others."""
        added = _listed(other)
        self._downstream += added
        _join(self._upstream, added, self)


# Written so for the checker: `|` of names in quotes does not exist before Python 3.14.
Nodes = Union[Node, Sequence[Any]]  # noqa: UP007
NodesT = TypeVar("NodesT", bound=Nodes)


def Label(label: str) -> EdgeModifier:
    """Return a label for edges.

    Args:
        label: What people see on the edges.
    """
    return EdgeModifier(label)


def chain(*nodes: Nodes) -> None:
    """Let each node come after the one before: `chain(a, [b, c], [d, e], f)`; lists beside each other go in pairs.

    Raises:
        DagError: Two lists beside each other differ in length.
    """
    for before, after in pairwise(nodes):
        if isinstance(before, Node) or isinstance(after, Node):
            _join(before, after, None)
            continue
        if len(before) != len(after):
            raise DagError(
                f"chain: lists of {len(before)} and {len(after)} tasks are beside each other; they must be of the same "
                "length; for an edge from each to each use cross_downstream"
            )
        for one, other in zip(before, after, strict=True):
            _join(one, other, None)


def chain_linear(*nodes: Nodes) -> None:
    """Let each node, or all of a list, come after all of the one before."""
    for before, after in pairwise(nodes):
        _join(before, after, None)


def cross_downstream(from_tasks: Sequence[Any], to_tasks: Nodes) -> None:
    """Let each of some nodes come after each of others."""
    _join(from_tasks, to_tasks, None)


def connect(before: TaskNode, after: TaskNode, label: str = "") -> None:
    """Let a task come after another one.

    Raises:
        DagError: They are of different DAGs, or the same task.
    """
    if before is after:
        raise DagError(f"task {before.task_id!r}: it cannot come after itself")
    if before.dag is None and after.dag is not None:
        before.dag = after.dag
    elif after.dag is None and before.dag is not None:
        after.dag = before.dag
    if before.dag is not after.dag:
        raise DagError(
            f"task {after.task_id!r} of DAG {after.dag.dag_id!r} cannot come after task {before.task_id!r} of DAG "
            f"{before.dag.dag_id!r}: tasks of different DAGs have no edges"
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
                f"{node!r} of type {type(node).__name__} cannot come before or after a task; only tasks, groups and "
                "what @task functions return can"
            )
        found.update((id(task), task) for task in tasks)
    return list(found.values())
