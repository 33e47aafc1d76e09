"""The parts of a DAG's structure that the store needs, prepared once per version and cached.

Invariants: a plan is immutable and depends only on the text of the structure; the digest of that text is its cache key.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tidemill.core.tasks.admission import ActiveLimits
from tidemill.core.tasks.dependencies import REMOVED, OutcomeTally, TaskOutcome, Told, TriggerRule, Upstream
from tidemill.core.tasks.expansion import MapPolicy
from tidemill.core.tasks.structure import ChunkStructure, DagStructure, TaskStructure
from tidemill.core.tasks.task_row import Policy

_OUTCOMES = (TaskOutcome.SUCCESS, TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED, TaskOutcome.SKIPPED)
#: The numbers of a tally: one for each outcome, and how many more than its upstream tasks it counts.
_SIZE = len(_OUTCOMES) + 1
#: The capacity of the cache.
_KEPT = 256

#: The tallies of a task: `direct` alone, or all three.
Counts = tuple[int, ...]
#: The tallies of a task whose upstream tasks have told nothing.
NO_COUNTS: Counts = (0,) * _SIZE


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A task of a DAG.

    Attributes:
        number: Its index among the tasks, in order of id.
        structure: The task as its author defined it.
        policy: The settings that the state machine needs; for a mapped task, the settings of an element.
        head_policy: The settings of the whole mapped task; for other tasks, the same as `policy`.
        rule: Its trigger rule.
        totals: The number of direct upstream tasks, of setups among them, and of tasks in `scope`, as its tallies count
            them: the sources of a mapped task are left out, except maps that it needs as a whole, and of a task in a
            mapped group, the tasks of that group.
        inner_totals: The same numbers for an element: of a task in a mapped group, the tasks of that group alone.
        successors: The tasks whose tallies depend on this task's outcome, each with the indexes of the affected
            tallies.
        inner: The same for an element of a task in a mapped group: the tasks of that group, and the group, whose
            element counts all its tasks with that index.
        downstream: Its direct downstream tasks.
        feeds: The mapped tasks of which it is a source.
        followers: The mapped tasks that follow it element by element.
    """

    number: int
    structure: TaskStructure
    policy: Policy
    head_policy: Policy
    rule: TriggerRule
    totals: tuple[int, int, int]
    inner_totals: tuple[int, int, int] = (0, 0, 0)
    successors: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    inner: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    downstream: list[str] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)
    followers: list[str] = field(default_factory=list)

    @property
    def chunk(self) -> ChunkStructure | None:
        """How the items of the mapped task are put into lists; None: they are not."""
        return None if self.structure.mapped is None else self.structure.mapped.chunk

    @property
    def iterated(self) -> bool:
        """Whether one attempt runs all elements of the mapped task."""
        return self.structure.mapped is not None and self.structure.mapped.iterated

    @property
    def mapped_group(self) -> str:
        """The mapped group that it is, or is a task of; empty: none."""
        return self.structure.id if self.structure.is_group else self.structure.mapped_group

    def tell_unit(self, counts: Counts) -> Told:
        """Return what the tasks of a unit have become; `counts`: the tallies of the unit.

        A unit that has lost one of its tasks is removed: its group starts over, or was cancelled before it did.
        """
        tally = self.build_upstream(counts, inner=True).direct
        kinds = frozenset(outcome for outcome in _OUTCOMES if getattr(tally, outcome.value))
        done = tally.done == tally.total
        return REMOVED if done and tally.total < self.inner_totals[0] else Told(kinds, done)

    def build_upstream(self, counts: Counts, *, inner: bool = False) -> Upstream:
        """Return the tallies by which the state machine decides. `inner`: those of an element."""
        direct, setups, scope = self.inner_totals if inner else self.totals
        if len(counts) == _SIZE:
            return Upstream(_build_tally(direct, counts), OutcomeTally(setups), OutcomeTally(scope))
        return Upstream(
            _build_tally(direct, counts[:_SIZE]),
            _build_tally(setups, counts[_SIZE : 2 * _SIZE]),
            _build_tally(scope, counts[2 * _SIZE :]),
        )

    def build_map_policy(self, max_outstanding: int, max_length: int) -> MapPolicy | None:
        """Return the limits of a mapped task; None if the task is not mapped.

        Args:
            max_outstanding: The window of tasks that set none.
            max_length: The maximum number of elements.
        """
        mapped, at_once = self.structure.mapped, self.structure.max_active_per_run
        if mapped is None:
            return None
        window = max_outstanding if mapped.max_outstanding is None else mapped.max_outstanding
        # More elements than may be active would only fill the queue of the scheduler.
        return MapPolicy(window if at_once is None else min(window, at_once), mapped.max_failed_elements, max_length)


@dataclass(frozen=True, slots=True)
class DagPlan:
    """The plan of a DAG.

    Attributes:
        structure: The DAG as its author defined it.
        tasks: Its tasks by id.
        leaves: The tasks whose outcomes decide the outcome of a run.
        limits: The limits on active tasks; None: no limits.
        teardowns: The ids of its teardowns.
        by_past: Whether tasks of a run depend on tasks of the previous run.
        maps: The ids of its mapped tasks, including mapped groups and their tasks.
        groups: The ids of its mapped groups, each with the ids of its tasks, sorted.
        starts: Whether any of its tasks starts in a trigger.
    """

    structure: DagStructure
    tasks: dict[str, TaskPlan]
    leaves: frozenset[str]
    limits: ActiveLimits | None
    teardowns: tuple[str, ...]
    by_past: bool
    maps: tuple[str, ...] = ()
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    starts: bool = False

    def list_downstream(self, ids: Iterable[str], limit: int | None = None) -> list[str]:
        """Return the tasks downstream of the given ones, nearest first.

        Args:
            ids: The tasks to start from.
            limit: Stop after about this many; None: return all.
        """
        found: dict[str, None] = {}
        edge = list(ids)
        while edge and (limit is None or len(found) < limit):
            after = dict.fromkeys(name for task in edge for name in self.tasks[task].downstream)
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
    groups = {one.id: _list_inner(structure, one.id) for one in structure.tasks if one.is_group}
    inside = {name: frozenset(names) for name, names in groups.items()}
    tasks = {}
    for number, one in enumerate(structure.tasks):
        inner = inside.get(one.mapped_group, frozenset())
        outer = [[name for name in names if name not in inner] for names in _list_counted(one)]
        policy = Policy(is_unit=True) if one.is_group else _build_policy(one)
        head = policy if one.mapped is None else Policy(is_map=True)
        totals = _count(outer)
        inner_totals = (len(groups[one.id]), 0, 0) if one.is_group else _count(_list_counted(one), less=totals)
        tasks[one.id] = TaskPlan(number, one, policy, head, TriggerRule(one.rule), totals, inner_totals)
    for one in structure.tasks:
        sources = _list_sources(one)
        inner = inside.get(one.mapped_group, frozenset())
        if one.follows is not None:
            tasks[one.follows].followers.append(one.id)
        for name in one.upstream:
            tasks[name].downstream.append(one.id)
            if one.mapped is not None and name in one.mapped.sources:
                tasks[name].feeds.append(one.id)
            if name not in sources:
                counted = tasks[name].inner if name in inner else tasks[name].successors
                counted.append((one.id, (0, 1) if name in one.setups else (0,)))
        for name in one.scope:
            counted = tasks[name].inner if name in inner else tasks[name].successors
            counted.append((one.id, (2,)))
        if one.mapped_group:
            tasks[one.id].inner.append((one.mapped_group, (0,)))
            tasks[one.mapped_group].downstream.append(one.id)
    by_past = structure.waits_for_past
    teardowns = tuple(one.id for one in structure.tasks if one.is_teardown)
    maps = tuple(one.id for one in structure.tasks if one.mapped is not None)
    leaves, limits = frozenset(_find_leaves(tasks)), _build_limits(structure)
    starts = any(one.start is not None for one in structure.tasks)
    return DagPlan(structure, tasks, leaves, limits, teardowns, by_past, maps, groups, starts)


def _list_inner(structure: DagStructure, group: str) -> tuple[str, ...]:
    return tuple(one.id for one in structure.tasks if one.mapped_group == group)


def _list_counted(task: TaskStructure) -> tuple[list[str], list[str], list[str]]:
    """Return the tasks that the three tallies of a task count."""
    sources = _list_sources(task)
    direct, setups = ([name for name in names if name not in sources] for names in (task.upstream, task.setups))
    return direct, setups, list(task.scope)


def _count(names: Sequence[Sequence[str]], less: tuple[int, int, int] = (0, 0, 0)) -> tuple[int, int, int]:
    direct, setups, scope = (len(each) - fewer for each, fewer in zip(names, less, strict=True))
    return direct, setups, scope


def _list_sources(task: TaskStructure) -> frozenset[str]:
    """Return the sources of a mapped task that its rule does not count."""
    if task.mapped is None:
        return frozenset()
    counted = task.mapped.maps - {task.follows}
    return frozenset(task.mapped.sources) - counted


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

    leaves = [name for name in tasks if counts(name) and not any(map(counts, tasks[name].downstream))]
    # If all tasks are teardowns, the last of them decide the outcome.
    yield from leaves or [name for name in tasks if not tasks[name].downstream]


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
    """Parse the stored tallies of a task."""
    if not text:
        return NO_COUNTS
    counts = tuple(map(int, text.split()))
    if len(counts) % _SIZE:
        # No tally counts more than its upstream tasks.
        groups = [counts[first : first + _SIZE - 1] for first in range(0, len(counts), _SIZE - 1)]
        counts = tuple(count for group in groups for count in (*group, 0))
    return counts


def write_counts(counts: Counts) -> str:
    """Format the tallies of a task for storage: one or three groups of four counts, of five where maps are upstream."""
    if not any(counts):
        return ""
    if not any(counts[_SIZE - 1 :: _SIZE]):
        counts = tuple(count for number, count in enumerate(counts, 1) if number % _SIZE)
    return " ".join(map(str, counts))


def move_counts(counts: Counts, kinds: tuple[int, ...], before: Told, after: Told) -> Counts:
    """Return the tallies after an upstream task tells `after` instead of `before`.

    Example:
        >>> move_counts(NO_COUNTS, (0,), Told(), Told(frozenset((TaskOutcome.SUCCESS,)), done=True))
        (1, 0, 0, 0, 0)
    """
    changed = list(counts)
    if max(kinds) and len(changed) == _SIZE:
        changed += [0] * (2 * _SIZE)
    for kind in kinds:
        for place, outcome in enumerate(_OUTCOMES, kind * _SIZE):
            changed[place] += (outcome in after.kinds) - (outcome in before.kinds)
        changed[(kind + 1) * _SIZE - 1] += after.extra - before.extra
    return tuple(changed)


def _build_tally(total: int, counts: Counts) -> OutcomeTally:
    *ended, extra = counts
    return OutcomeTally(total + extra, *ended)
