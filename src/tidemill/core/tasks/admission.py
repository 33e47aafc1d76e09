"""Decides which waiting tasks get slots.

Free slots are counted from the rows that hold slots, each time, under the lock of the pool: no counter can drift, and
nothing can be left behind.

Invariants:
1. No limit is exceeded: slots of the pool, tasks of the DAG, instances of one task in the DAG and in its run.
2. Within a pool no task overtakes another for want of slots: if the next task does not fit, those behind it wait, so
   that a task that needs many slots gets them. A task that could never fit is skipped and reported.
3. A task that waits for a limit of its DAG holds up no other DAG.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task that waits for slots.

    Attributes:
        number: The task's number in the store.
        dag: The number of its DAG.
        run: The number of its run.
        task: Its name within the DAG.
        slots: The number of slots of the pool that it needs.
        resumed: Whether it continues after a deferral.
        returns: Whether it is a running attempt that waited at its `yield` without slots. It comes before all others:
            they may need what it has not yielded yet.
        priority: Tasks with a higher priority come first.
        since_us: When it began to wait, in UTC microseconds.
        passes: Whether it returns its slots at once: a task that starts in a trigger is admitted only while there is
            room for it, but then waits without slots.
    """

    number: int
    dag: int
    run: int
    task: str
    slots: int = 1
    resumed: bool = False
    priority: int = 1
    since_us: int = 0
    returns: bool = False
    passes: bool = False


@dataclass(frozen=True, slots=True)
class ActiveLimits:
    """The author's limits on the active tasks of a DAG; None: no limit.

    Attributes:
        per_dag: Tasks of the DAG, in all its runs (`max_active_tasks`).
        per_task: By task, in all runs of the DAG (`max_active_tis_per_dag`).
        per_task_and_run: By task, in each run (`max_active_tis_per_dagrun`).
    """

    per_dag: int | None = None
    per_task: Mapping[str, int] = field(default_factory=dict)
    per_task_and_run: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Active:
    """The numbers of tasks that count towards the limits of the DAGs: those that hold slots, are deferred, or wait
    resumed.

    Attributes:
        per_dag: By DAG.
        per_task: By DAG and task.
        per_task_and_run: By run and task.
    """

    per_dag: Mapping[int, int] = field(default_factory=dict)
    per_task: Mapping[tuple[int, str], int] = field(default_factory=dict)
    per_task_and_run: Mapping[tuple[int, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolAdmission:
    """The decision about the candidates of a pool.

    Attributes:
        admitted: The tasks that get their slots, in order.
        too_large: The tasks that need more slots than the pool has.
    """

    admitted: tuple[int, ...]
    too_large: tuple[int, ...]


def order(candidate: Candidate) -> tuple[bool, bool, int, int, int]:
    """Return the key by which candidates are sorted: returning ones, then resumed ones, then by priority and age."""
    return (not candidate.returns, not candidate.resumed, -candidate.priority, candidate.since_us, candidate.number)


def admit(
    candidates: Iterable[Candidate], slots: int, used: int, limits: Mapping[int, ActiveLimits], active: Active
) -> PoolAdmission:
    """Decide which tasks of one pool get slots.

    Args:
        candidates: The tasks that wait for this pool.
        slots: The number of slots in the pool.
        used: The number of slots that are held.
        limits: The limits by DAG; a DAG that is missing has none.
        active: The tasks that already count towards the limits.
    """
    room = _Room(limits, active)
    free = slots - used
    admitted: list[int] = []
    too_large: list[int] = []
    for candidate in sorted(candidates, key=order):
        if candidate.slots > slots:
            too_large.append(candidate.number)
        elif room.has_room(candidate):
            if candidate.slots > free:
                break
            free -= 0 if candidate.passes else candidate.slots
            room.take(candidate)
            admitted.append(candidate.number)
    return PoolAdmission(tuple(admitted), tuple(too_large))


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """A limit on the active tasks of a DAG that is reached.

    Attributes:
        name: The argument that sets it.
        limit: The limit.
        active: The number of tasks that count towards it.
    """

    name: str
    limit: int
    active: int


def find_reached(dag: int, run: int, task: str, limits: ActiveLimits, active: Active) -> tuple[ReachedLimit, ...]:
    """Return the limits that keep a task from starting.

    Args:
        dag: The number of its DAG.
        run: The number of its run.
        task: Its name within the DAG.
        limits: The limits of the DAG.
        active: The tasks that count towards the limits.

    Example:
        >>> find_reached(1, 7, "load", ActiveLimits(per_dag=2), Active(per_dag={1: 2}))
        (ReachedLimit(name='max_active_tasks', limit=2, active=2),)
    """
    counts = (
        ("max_active_tasks", limits.per_dag, active.per_dag.get(dag, 0)),
        ("max_active_tis_per_dag", limits.per_task.get(task), active.per_task.get((dag, task), 0)),
        ("max_active_tis_per_dagrun", limits.per_task_and_run.get(task), active.per_task_and_run.get((run, task), 0)),
    )
    return tuple(
        ReachedLimit(name, limit, count) for name, limit, count in counts if limit is not None and count >= limit
    )


class _Room:
    """The remaining room within the limits of the DAGs."""

    def __init__(self, limits: Mapping[int, ActiveLimits], active: Active) -> None:
        self._limits = limits
        self._per_dag = dict(active.per_dag)
        self._per_task = dict(active.per_task)
        self._per_task_and_run = dict(active.per_task_and_run)

    def has_room(self, candidate: Candidate) -> bool:
        limits = self._limits.get(candidate.dag)
        if limits is None or candidate.resumed:
            # A deferred task still counts towards the limits, so it needs no room to continue.
            return True
        active = Active(self._per_dag, self._per_task, self._per_task_and_run)
        return not find_reached(candidate.dag, candidate.run, candidate.task, limits, active)

    def take(self, candidate: Candidate) -> None:
        if candidate.resumed:
            return
        in_dag, in_run = (candidate.dag, candidate.task), (candidate.run, candidate.task)
        self._per_dag[candidate.dag] = self._per_dag.get(candidate.dag, 0) + 1
        self._per_task[in_dag] = self._per_task.get(in_dag, 0) + 1
        self._per_task_and_run[in_run] = self._per_task_and_run.get(in_run, 0) + 1
