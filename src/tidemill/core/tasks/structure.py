"""The structure of a DAG as its file defines it. The store keeps it; the scheduler and all views read it.

The values are plain and written as JSON. The same file gives the same text on every machine and in every process, so
that a new version exists only when something changed. Reading it needs no user code.

Invariants: tasks are sorted by id, and so are the ids within them; there is no cycle; every id that is mentioned
exists. Durations are whole microseconds; times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

#: The number of this format; texts in other formats are not read.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ScheduleStructure:
    """The schedule of a DAG.

    Attributes:
        kind: `none`, `once`, `cron` or `interval`.
        cron: The expression, if `kind` is `cron`; presets are resolved.
        zone: The IANA name of the time zone of the expression.
        interval_us: The time from one run to the next, if `kind` is `interval`.
        start_us: The first time that may be due; None: times count from when the DAG became known.
        end_us: The last time that may be due.
        catchup: Whether times that passed before the DAG became known, or while it was paused, are made up for.
    """

    kind: str = "none"
    cron: str = ""
    zone: str = "UTC"
    interval_us: int | None = None
    start_us: int | None = None
    end_us: int | None = None
    catchup: bool = False


@dataclass(frozen=True, slots=True)
class MapSource:
    """The source of the values of a mapped argument.

    Attributes:
        kind: `literal`: a list or dict in the DAG's file; `xcom`: an XCom of another task; `param`: a parameter or an
            entry of the run's conf; `generator`: the values that another task yields, one by one; `map`: the XComs of
            the elements of another mapped task; `results`: those of elements that run in one attempt; `zip`: the items
            of `parts`, paired by index; `group`: the items of the mapped group `task`, of which the task is a part;
            `loop`: the iterations of a looped group, which have no items.
        task: The task that gives the values, if `kind` is `xcom`, `generator`, `map` or `results`; the group, if it is
            `group`.
        key: The key of the XComs, or the name of the parameter.
        length: The number of values, if `kind` is `literal`.
        parts: The sources that are paired, if `kind` is `zip`.
        fills: Whether a pair exists as long as one of `parts` has an item; otherwise the shortest part decides.
    """

    kind: str
    task: str = ""
    key: str = ""
    length: int | None = None
    parts: tuple[MapSource, ...] = ()
    fills: bool = False

    @property
    def leaves(self) -> tuple[MapSource, ...]:
        """The sources that have items of their own: the source itself, or those that it pairs, in order."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) if self.kind == "zip" else (self,)

    @property
    def has_gaps(self) -> bool:
        """Whether the values are the results of another mapped task, some of which may be missing."""
        return self.kind in ("map", "results")


@dataclass(frozen=True, slots=True)
class ChunkStructure:
    """The lists into which the items of a mapped task are put; each list is the value of an element.

    Attributes:
        max_items: The maximum number of items of a list.
        max_wait_us: How long the first item of a list waits for others, while a generator may yield more; None: until
            the list is full, or the generator has ended.
    """

    max_items: int
    max_wait_us: int | None = None


@dataclass(frozen=True, slots=True)
class LoopStructure:
    """The iterations of a looped group, which run one after the other.

    Attributes:
        max_iterations: The most iterations.
        gate: The task of the group that runs last, and decides whether another iteration follows.
    """

    max_iterations: int
    gate: str


@dataclass(frozen=True, slots=True)
class MapStructure:
    """How a task is mapped: it has one element for each combination of the items of its factors.

    Attributes:
        arguments: The mapped arguments, by factor; `**`: the items are dicts of arguments (`expand_kwargs`).
        factors: The sources of their values. The last one varies fastest; a generator, of which there is at most one,
            slowest.
        max_outstanding: The number of elements that may be unfinished at a time; None: the default of the settings.
        max_failed_elements: The number of elements that may fail before the map stops; None: any number.
        index_template: The template of an element's label (`map_index_template`); empty: none.
        chunk: How items are put into lists; None: each item is the value of an element.
        loop: How a looped group goes on; None: it is not looped.
        iterated: Whether one attempt runs the task for all items: the map has a single element, which begins with the
            first item.
    """

    arguments: tuple[str, ...] = ()
    factors: tuple[MapSource, ...] = ()
    max_outstanding: int | None = None
    max_failed_elements: int | None = None
    index_template: str = ""
    chunk: ChunkStructure | None = None
    iterated: bool = False
    loop: LoopStructure | None = None

    @property
    def leaves(self) -> tuple[MapSource, ...]:
        """The sources that have items of their own, in the order of the factors."""
        return tuple(leaf for factor in self.factors for leaf in factor.leaves)

    @property
    def sources(self) -> tuple[str, ...]:
        """The tasks that give the items, sorted."""
        return tuple(sorted({leaf.task for leaf in self.leaves if leaf.task and leaf.kind != "group"}))

    @property
    def maps(self) -> frozenset[str]:
        """The mapped tasks among the sources."""
        return frozenset(leaf.task for leaf in self.leaves if leaf.has_gaps)

    @property
    def slowest(self) -> int:
        """The position of the factor that varies slowest."""
        return next((place for place, factor in enumerate(self.factors) if factor.kind == "generator"), 0)


def find_followed(rule: str, factors: Sequence[MapSource]) -> str | None:
    """Return the mapped task that a task with this rule and these factors follows element by element."""
    follows = rule == "all_success" and len(factors) == 1 and factors[0].kind == "map"
    return factors[0].task if follows else None


@dataclass(frozen=True, slots=True)
class StartStructure:
    """The start of each try of a task in a trigger, without a worker.

    Attributes:
        classpath: The import path of the trigger's class.
        kwargs: The arguments of the trigger, encoded.
        method: The method of the operator that continues; empty: the trigger itself ends the task.
        method_kwargs: The arguments of that method, encoded.
        timeout_us: How long the trigger may take; None: no limit.
        rendered: Whether the texts in the arguments are templates.
        native: Whether templates render to Python values instead of texts.
        elements: For a task that is mapped over literal values: the arguments of each element, encoded.
        leaf: For a task that is mapped over `trigger_kwargs`, and not over literal values: the position of their source
            among the leaves of the map.
        items: By leaf of the map, the encoded items that are in the file, where the arguments need them.
        feeds: Whether each event of the trigger is an element that the task gives to the maps over it.
        may_be_empty: Whether such a trigger may end without an event.
    """

    classpath: str
    kwargs: str = "{}"
    method: str = ""
    method_kwargs: str = "{}"
    timeout_us: int | None = None
    rendered: bool = False
    native: bool = False
    elements: tuple[str, ...] = ()
    leaf: int | None = None
    items: tuple[tuple[str, ...], ...] = ()
    feeds: bool = False
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True)
class TaskStructure:
    """A task of a DAG.

    Attributes:
        id: Its id, prefixed with the ids of its groups.
        operator: The name of its class, for display.
        rule: Its trigger rule.
        upstream: Its direct upstream tasks.
        setups: The setups in `upstream`.
        scope: The setups in whose scope it is that are not in `upstream`.
        is_setup: Whether it is a setup.
        is_teardown: Whether it is a teardown.
        fails_run: Whether its failure makes the run fail, if it is a teardown (`on_failure_fail_dagrun`).
        group: Its group; empty: none.
        label: The name to display instead of its id; empty: the id without the ids of its groups.
        doc: Its documentation, in Markdown.
        queue: The queue, which decides which workers may run it.
        pool: The pool that it takes slots from.
        pool_slots: The number of slots it takes.
        priority: Its effective priority, by `weight_rule`.
        retries: The number of tries that may follow the first one.
        retry_delay_us: The pause before a retry.
        exponential: Whether the pauses grow.
        max_retry_delay_us: The longest pause.
        execution_timeout_us: How long a try may take; None: no limit.
        soft_fail: Whether it is skipped instead of failed if its trigger fails or is too late.
        depends_on_past: Whether it waits until its instance in the previous run has succeeded or was skipped.
        wait_for_downstream: Whether it also waits for the direct downstream tasks of that instance.
        max_active_per_dag: The number of its instances that may be active, in all runs (`max_active_tis_per_dag`).
        max_active_per_run: The number that may be active in each run (`max_active_tis_per_dagrun`).
        callbacks: Its callbacks, from `on_success`, `on_failure`, `on_retry` and `on_skipped`.
        edge_labels: The labels of the edges to downstream tasks, by task id.
        is_sensor: Whether it is a sensor.
        template_fields: The names of its arguments that are rendered as templates.
        mapped: How it is mapped; None: it is not mapped.
        is_generator: Whether it yields its result value by value.
        is_group: Whether it stands for a mapped group of tasks; its elements are the units of the group. It has the
            id of the group and no operator.
        mapped_group: The mapped group that it belongs to, directly or through its other groups; empty: none. Such a
            task is mapped over its group alone (`MapSource.kind` is `group`).
        start: How its tries begin without a worker; None: a worker begins them.
    """

    id: str
    operator: str = ""
    rule: str = "all_success"
    upstream: tuple[str, ...] = ()
    setups: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    is_setup: bool = False
    is_teardown: bool = False
    fails_run: bool = False
    group: str = ""
    label: str = ""
    doc: str = ""
    queue: str = "default"
    pool: str = "default_pool"
    pool_slots: int = 1
    priority: int = 1
    retries: int = 0
    retry_delay_us: int = 300_000_000
    exponential: bool = False
    max_retry_delay_us: int = 86_400_000_000
    execution_timeout_us: int | None = None
    soft_fail: bool = False
    depends_on_past: bool = False
    wait_for_downstream: bool = False
    max_active_per_dag: int | None = None
    max_active_per_run: int | None = None
    callbacks: tuple[str, ...] = ()
    edge_labels: dict[str, str] = field(default_factory=dict)
    is_sensor: bool = False
    template_fields: tuple[str, ...] = ()
    mapped: MapStructure | None = None
    is_generator: bool = False
    is_group: bool = False
    mapped_group: str = ""
    start: StartStructure | None = None

    @property
    def follows(self) -> str | None:
        """The mapped task that it follows element by element; None: it is not mapped, or needs its sources as a whole.

        A task does if the other is its only source and its rule is `all_success`: each element depends on the one with
        its index. With any other rule or source its elements depend on the other map as a whole; so do lists of items
        (`chunk`), elements that run in one attempt, and the units of a mapped group.
        """
        if self.mapped is None or self.is_group or self.mapped.chunk is not None or self.mapped.iterated:
            return None
        return find_followed(self.rule, self.mapped.factors)


@dataclass(frozen=True, slots=True)
class ParamStructure:
    """A parameter of a run.

    Attributes:
        name: Its name.
        default: Its encoded default value; None: the run has to give one.
        schema: The JSON schema that a value has to match, as JSON text.
        description: Its description, for users.
    """

    name: str
    default: str | None = None
    schema: str = "{}"
    description: str = ""


@dataclass(frozen=True, slots=True)
class DagStructure:
    """A DAG.

    Attributes:
        id: Its id.
        tasks: Its tasks, sorted by id.
        schedule: Its schedule.
        params: Its parameters, sorted by name.
        tags: Its tags, sorted.
        doc: Its documentation, in Markdown.
        label: The name to display instead of its id; empty: the id.
        groups: The ids of its groups, sorted, with their display names (tooltips and prefixes are left out).
        max_active_runs: The number of its runs that may be active.
        max_active_tasks: The number of its tasks that may be active, in all runs; None: no limit.
        run_timeout_us: How long a run may take; None: no limit.
        fail_fast: Whether the first failure skips all tasks that have not started.
        callbacks: Its callbacks, from `on_success` and `on_failure`.
        format: The number of this format.
    """

    id: str
    tasks: tuple[TaskStructure, ...] = ()
    schedule: ScheduleStructure = ScheduleStructure()
    params: tuple[ParamStructure, ...] = ()
    tags: tuple[str, ...] = ()
    doc: str = ""
    label: str = ""
    groups: dict[str, str] = field(default_factory=dict)
    max_active_runs: int = 16
    max_active_tasks: int | None = None
    run_timeout_us: int | None = None
    fail_fast: bool = False
    callbacks: tuple[str, ...] = ()
    format: int = FORMAT

    def list_upstream(self) -> dict[str, tuple[str, ...]]:
        """Return the direct upstream tasks of each task for display: a mapped group is upstream of its first tasks.

        Example:
            >>> tasks = (TaskStructure("g", is_group=True), TaskStructure("g.a", mapped_group="g"), TaskStructure("b"))
            >>> DagStructure("d", tasks).list_upstream()
            {'g': (), 'g.a': ('g',), 'b': ()}
        """
        group_of = {one.id: one.mapped_group for one in self.tasks if one.mapped_group}
        found = {}
        for one in self.tasks:
            is_first = one.mapped_group and all(group_of.get(name) != one.mapped_group for name in one.upstream)
            found[one.id] = (one.mapped_group, *one.upstream) if is_first else one.upstream
        return found

    def list_groups(self) -> dict[str, list[str]]:
        """Return the tasks of each mapped group, by id."""
        found: dict[str, list[str]] = {one.id: [] for one in self.tasks if one.is_group}
        for one in self.tasks:
            if one.mapped_group:
                found[one.mapped_group].append(one.id)
        return found

    @property
    def waits_for_past(self) -> bool:
        """Whether tasks of a run wait for tasks of the previous run."""
        return any(one.depends_on_past or one.wait_for_downstream for one in self.tasks)


def hide_arguments(structure: DagStructure) -> DagStructure:
    """Return a structure for display, without the arguments of triggers, among which there may be secrets."""
    return replace(structure, tasks=tuple(map(_hide_arguments, structure.tasks)))


def _hide_arguments(task: TaskStructure) -> TaskStructure:
    start = task.start
    if start is None:
        return task
    return replace(task, start=StartStructure(start.classpath, method=start.method, timeout_us=start.timeout_us))
