"""The structure of a DAG, as its file defined it: what the store keeps, and everything that shows or schedules reads.

Plain values that are written as JSON: the same file gives the same text, on every machine and in every process, so
that a new version exists only where something changed. No code of the user is needed to read it.

Invariants: tasks are sorted by id, and so are the ids within them; there is no cycle; every id that is named exists.
Durations are whole microseconds, times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The number of this format; a text with another one is not read.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ScheduleStructure:
    """When a DAG runs by itself.

    Attributes:
        kind: `none`, `once`, `cron` or `interval`.
        cron: The expression, if `kind` is `cron`; presets are resolved.
        zone: The IANA name of the time zone in which the expression is read.
        interval_us: The time from one run to the next, if `kind` is `interval`.
        start_us: The first time that may be due; None: times count from when the DAG is known.
        end_us: The last time that may be due.
        catchup: Whether times that passed before the DAG was known, or while it was paused, are made up for.
    """

    kind: str = "none"
    cron: str = ""
    zone: str = "UTC"
    interval_us: int | None = None
    start_us: int | None = None
    end_us: int | None = None
    catchup: bool = False


@dataclass(frozen=True, slots=True)
class TaskStructure:
    """A task of a DAG.

    Attributes:
        id: Its id, with those of its groups in front.
        operator: The name of its class, for people.
        rule: Its trigger rule.
        upstream: The tasks directly before it.
        setups: Those of `upstream` that are setups.
        scope: The setups in whose scope it is that are not in `upstream`.
        is_setup: Whether it is a setup.
        is_teardown: Whether it is a teardown.
        fails_run: Whether its failure makes the run fail, if it is a teardown (`on_failure_fail_dagrun`).
        group: The group that it is in; empty: none.
        label: What people see instead of its id; empty: the id without those of its groups.
        doc: Its documentation, in Markdown.
        queue: Which workers may run it.
        pool: The pool that it takes slots from.
        pool_slots: How many.
        priority: Its effective priority, by `weight_rule`.
        retries: How many tries may follow the first one.
        retry_delay_us: The pause before a retry.
        exponential: Whether the pauses grow.
        max_retry_delay_us: The longest pause.
        execution_timeout_us: How long a try may take; None: any time.
        soft_fail: Whether it is skipped where it would fail because its trigger failed or came too late.
        depends_on_past: Whether it waits for its instance in the run before to succeed, or to be skipped.
        wait_for_downstream: Whether it waits for the tasks directly after that instance, too.
        max_active_per_dag: How many instances of it may be active, in all runs (`max_active_tis_per_dag`).
        max_active_per_run: How many in each run (`max_active_tis_per_dagrun`).
        callbacks: Which callbacks it has, of `on_success`, `on_failure`, `on_retry` and `on_skipped`.
        edge_labels: What people see on the edges to tasks after it, by their ids.
        is_sensor: Whether it waits for something outside.
        template_fields: Which of its arguments are rendered.
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


@dataclass(frozen=True, slots=True)
class ParamStructure:
    """A parameter of a run.

    Attributes:
        name: Its name.
        default: Its value unless the run gives one, encoded; None: the run has to give one.
        schema: JSON schema that a value has to match, as JSON text.
        description: What it is, for people.
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
        tasks: By id, sorted.
        schedule: When it runs by itself.
        params: Its parameters, sorted by name.
        tags: Sorted.
        doc: Its documentation, in Markdown.
        label: What people see instead of its id; empty: the id.
        groups: The ids of its groups, sorted, with what people see instead (tooltips and prefixes are left out).
        max_active_runs: How many of its runs may be active.
        max_active_tasks: How many of its tasks may be active, in all runs; None: any number.
        run_timeout_us: How long a run may take; None: any time.
        fail_fast: Whether the first failure skips what has not started.
        callbacks: Which callbacks the DAG has, of `on_success` and `on_failure`.
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

    @property
    def waits_for_past(self) -> bool:
        """Whether tasks of a run wait for tasks of the run before."""
        return any(one.depends_on_past or one.wait_for_downstream for one in self.tasks)
