"""The parts of a DAG's structure that the store needs, prepared once per version and cached.

Invariants: a plan is immutable and depends only on the text of the structure; the digest of that text is its cache key.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from tidemill.core.tasks.admission import ActiveLimits
from tidemill.core.tasks.dependencies import OutcomeTally, TaskOutcome, TriggerRule, Upstream
from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.core.tasks.task_row import Policy

_OUTCOMES = (TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED)
_INDEX = {outcome: index for index, outcome in enumerate(_OUTCOMES)}
#: The capacity of the cache.
_KEPT = 256

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A task of a DAG.

    Attributes:
        number: Its index among the tasks, in order of id.
        structure: The task as its author defined it.
        policy: The settings that the state machine needs.
        rule: Its trigger rule.
        totals: The number of direct upstream tasks, of setups among them, and of tasks in `scope`.
        successors: The tasks whose tallies depend on this task's outcome, each with the indexes of the affected
            tallies.
    """

    number: int
    structure: TaskStructure
    policy: Policy
    rule: TriggerRule
    totals: tuple[int, int, int]
    successors: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def build_upstream(self, counts: Counts) -> Upstream:
        """Return the tallies by which the state machine decides."""
        if len(counts) == 4:
            return Upstream(
                OutcomeTally(self.totals[0], *counts), OutcomeTally(self.totals[1]), OutcomeTally(self.totals[2])
            )
        direct, setups, scope = counts[:4], counts[4:8], counts[8:]
        return Upstream(
            OutcomeTally(self.totals[0], *direct),
            OutcomeTally(self.totals[1], *setups),
            OutcomeTally(self.totals[2], *scope),
        )


@dataclass(frozen=True, slots=True)
class DagPlan:
    """The plan of a DAG.

    Attributes:
        structure: The DAG as its author defined it.
        tasks: Its tasks by id.
        leaves: The tasks whose outcomes decide the outcome of a run.
        limits: The limits on active tasks; None: there are none.
        teardowns: The ids of its teardowns.
        by_past: Whether tasks of a run depend on tasks of the previous run.
    """

    structure: DagStructure
    tasks: dict[str, TaskPlan]
    leaves: frozenset[str]
    limits: ActiveLimits | None
    teardowns: tuple[str, ...]
    by_past: bool

    def list_downstream(self, ids: Iterable[str], limit: int | None = None) -> list[str]:
        """Return the tasks downstream of the given ones, nearest first.

        Args:
            ids: The tasks to start from.
            limit: Stop after about this many; None: return all.
        """
        found: dict[str, None] = {}
        edge = list(ids)
        while edge and (limit is None or len(found) < limit):
            after = dict.fromkeys(name for task in edge for name, kinds in self.tasks[task].successors if 0 in kinds)
            edge = [name for name in after if name not in found]
            found.update(dict.fromkeys(edge))
        return list(found)

    def list_skipped(self, task: str) -> list[str]:
        """Return the tasks that a short circuit of this task skips."""
        return [name for name in self.list_downstream([task]) if not self.tasks[name].structure.is_teardown]


def read_structure(text: str | bytes) -> DagStructure:
    """Decode a structure.

    Raises:
        msgspec.DecodeError: The text is not a structure.
    """
    return msgspec.json.decode(text, type=DagStructure)


def compute_digest(structure: bytes) -> str:
    """Return the digest that identifies a structure."""
    return hashlib.sha256(structure).hexdigest()


def build_plan(structure: DagStructure) -> DagPlan:
    """Build the plan of a structure."""
    tasks = {}
    for number, one in enumerate(structure.tasks):
        totals = len(one.upstream), len(one.setups), len(one.scope)
        tasks[one.id] = TaskPlan(number, one, _build_policy(one), TriggerRule(one.rule), totals)
    for one in structure.tasks:
        for name in one.upstream:
            tasks[name].successors.append((one.id, (0, 1) if name in one.setups else (0,)))
        for name in one.scope:
            tasks[name].successors.append((one.id, (2,)))
    by_past = structure.waits_for_past
    teardowns = tuple(one.id for one in structure.tasks if one.is_teardown)
    return DagPlan(structure, tasks, frozenset(_find_leaves(tasks)), _build_limits(structure), teardowns, by_past)


def _build_limits(structure: DagStructure) -> ActiveLimits | None:
    per_task = {one.id: one.max_active_per_dag for one in structure.tasks if one.max_active_per_dag is not None}
    per_run = {one.id: one.max_active_per_run for one in structure.tasks if one.max_active_per_run is not None}
    if structure.max_active_tasks is None and not per_task and not per_run:
        return None
    return ActiveLimits(structure.max_active_tasks, per_task, per_run)


def _build_policy(task: TaskStructure) -> Policy:
    return Policy(
        task.retries,
        task.retry_delay_us,
        task.exponential,
        task.max_retry_delay_us,
        task.execution_timeout_us,
        task.soft_fail,
        task.is_sensor,
    )


def _find_leaves(tasks: dict[str, TaskPlan]) -> Iterator[str]:
    """Find the tasks that have no downstream task; teardowns count only if their failure fails the run."""

    def counts(name: str) -> bool:
        one = tasks[name].structure
        return not one.is_teardown or one.fails_run

    def list_after(name: str) -> list[str]:
        return [after for after, kinds in tasks[name].successors if 0 in kinds]

    leaves = [name for name in tasks if counts(name) and not any(map(counts, list_after(name)))]
    # If all tasks are teardowns, the last of them decide the outcome.
    yield from leaves or [name for name in tasks if not list_after(name)]


class PlanCache:
    """Caches the most recently used plans by the digest of the structure."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, DagPlan] = OrderedDict()

    def find(self, digest: str, load: Callable[[], str]) -> DagPlan:
        """Return the plan of a structure; if it is not cached, build it from the text that `load` returns."""
        plan = self._plans.get(digest)
        if plan is None:
            plan = self._plans[digest] = build_plan(read_structure(load()))
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(digest)
        return plan


def read_counts(text: str) -> Counts:
    """Parse the stored tallies of a task: four counts for `direct` alone, or twelve for all three tallies."""
    return tuple(map(int, text.split())) if text else (0, 0, 0, 0)


def write_counts(counts: Counts) -> str:
    """Format the tallies of a task for storage."""
    return " ".join(map(str, counts)) if any(counts) else ""


def move_counts(
    counts: Counts, kinds: tuple[int, ...], before: TaskOutcome | None, after: TaskOutcome | None
) -> Counts:
    """Return the tallies after the outcome of an upstream task changes from `before` to `after`.

    Example:
        >>> move_counts((0, 0, 0, 0), (0,), None, TaskOutcome.SUCCESS)
        (1, 0, 0, 0)
    """
    changed = list(counts)
    if max(kinds) and len(changed) == 4:
        changed += [0] * 8
    for kind in kinds:
        if before is not None:
            changed[4 * kind + _INDEX[before]] -= 1
        if after is not None:
            changed[4 * kind + _INDEX[after]] += 1
    return tuple(changed)
