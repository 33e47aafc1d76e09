"""A DAG: tasks with dependencies, and a schedule for them.

Invariants: ids are unique across the tasks and groups of a DAG; `validate` is called before anything outside of its
file reads a DAG.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, overload

from tidemill.dags import arguments
from tidemill.dags.arguments import check_bool, check_int, check_text
from tidemill.dags.exceptions import DagError, DuplicateTaskIdError
from tidemill.dags.group import TaskGroup
from tidemill.dags.maps.mapped_group import MappedTaskGroup
from tidemill.dags.operator import BaseOperator, Callbacks
from tidemill.dags.params import Param, wrap_params
from tidemill.dags.schedule import Schedule, describe_schedule
from tidemill.dags.scope import note_dag, open_dags, open_groups
from tidemill.dags.structure.order import Linked, add_groups, check_cycles, find_relatives
from tidemill.dags.xcom_arg import DagParam


class DAG:
    """A DAG; tasks created inside `with DAG(...)` belong to it.

    Args:
        dag_id: The id of the DAG: at most 250 letters, digits, `-`, `_` and `.`.
        description: One line about what the DAG does, for people.
        schedule: When runs start: a cron expression, `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`, `@once` or
            a timedelta. None: only when triggered.
        start_date: The earliest time that can be due. A cron expression is evaluated in the time zone of this date; the
            default is UTC.
        end_date: The latest time that can be due.
        catchup: Whether to create runs for the times that passed before the DAG was added or while it was paused.
        max_active_runs: How many runs of the DAG may be active at once.
        max_active_tasks: How many tasks may be active at once across all runs; None: no limit.
        dagrun_timeout: How long a run may take; None: no limit.
        default_args: Default arguments for the tasks of the DAG.
        params: Params of the runs: default values, or `Param`s.
        tags: Labels for finding the DAG.
        doc_md: The documentation of the DAG, in Markdown.
        dag_display_name: The name to show instead of the id.
        fail_fast: Whether the first failure skips all tasks that have not started; then the run fails.
        on_success_callback: Called with the context after a run has succeeded.
        on_failure_callback: Called with the context after a run has failed.
        user_defined_macros: More names for templates.
        user_defined_filters: More filters for templates.
        template_searchpath: Folders of template files, besides the folder of the DAG file.
        render_template_as_native_obj: Whether templates render to Python values instead of strings.

    Raises:
        DagError: An argument is invalid.
    """

    def __init__(
        self,
        dag_id: str,
        *,
        description: str | None = None,
        schedule: str | timedelta | None = None,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
        catchup: bool = False,
        max_active_runs: int = 16,
        max_active_tasks: int | None = None,
        dagrun_timeout: timedelta | None = None,
        default_args: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Iterable[str] | None = None,
        doc_md: str | None = None,
        dag_display_name: str | None = None,
        fail_fast: bool = False,
        on_success_callback: Callbacks = None,
        on_failure_callback: Callbacks = None,
        user_defined_macros: Mapping[str, Any] | None = None,
        user_defined_filters: Mapping[str, Callable[..., Any]] | None = None,
        template_searchpath: str | Sequence[str] | None = None,
        render_template_as_native_obj: bool = False,
    ) -> None:
        self.dag_id = arguments.check_id("dag_id", dag_id)
        name = f"DAG {dag_id!r}"
        if default_args is not None and not isinstance(default_args, Mapping):
            raise DagError(f"{name}: default_args must be a mapping of names to values, got {default_args!r}")
        self.default_args = dict(default_args or {})
        self.description = None if description is None else check_text(name, "description", description, empty=True)
        self.doc_md = None if doc_md is None else check_text(name, "doc_md", doc_md, empty=True)
        self.dag_display_name = (
            "" if dag_display_name is None else check_text(name, "dag_display_name", dag_display_name)
        )
        self.schedule = schedule
        # Many Airflow DAGs set `start_date` in `default_args`.
        self.start_date = start_date if start_date is not None else self.default_args.get("start_date")
        self.end_date = end_date
        self.catchup = check_bool(name, "catchup", catchup)
        self.timetable: Schedule = describe_schedule(name, schedule, self.start_date, end_date)
        self.max_active_runs = check_int(name, "max_active_runs", max_active_runs, 1)
        self.max_active_tasks = arguments.check_optional_int(name, "max_active_tasks", max_active_tasks, 1)
        self.dagrun_timeout = arguments.check_optional_duration(name, "dagrun_timeout", dagrun_timeout)
        self.params: dict[str, Param] = wrap_params(name, params, may_lack=self.timetable.kind == "none")
        if isinstance(tags, str):
            raise DagError(f"{name}: tags must be a list of strings, got {tags!r}; write [{tags!r}]")
        if tags is not None and not isinstance(tags, Iterable):
            raise DagError(f"{name}: tags must be a list of strings, got {tags!r}")
        self.tags = frozenset(check_text(name, "tags", tag) for tag in tags or ())
        self.fail_fast = check_bool(name, "fail_fast", fail_fast)
        self.on_success_callback = arguments.check_callbacks(name, "on_success_callback", on_success_callback)
        self.on_failure_callback = arguments.check_callbacks(name, "on_failure_callback", on_failure_callback)
        self.user_defined_macros = dict(user_defined_macros or {})
        self.user_defined_filters = dict(user_defined_filters or {})
        searchpath = [template_searchpath] if isinstance(template_searchpath, str) else template_searchpath
        self.template_searchpath = tuple(searchpath or ())
        self.render_template_as_native_obj = render_template_as_native_obj
        self.fileloc = ""
        self.task_dict: dict[str, BaseOperator] = {}
        self.groups: dict[str, TaskGroup] = {}
        #: What `partial` returned; each has to be expanded.
        self.partials: list[Any] = []
        self.edge_labels: dict[tuple[str, str], str] = {}
        self.task_group = TaskGroup(None, dag=self)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[BaseOperator]:
        """The tasks, in the order of their creation."""
        return list(self.task_dict.values())

    @property
    def task_ids(self) -> list[str]:
        """The ids of the tasks, in the order of their creation."""
        return list(self.task_dict)

    @property
    def roots(self) -> list[BaseOperator]:
        """The tasks without upstream tasks."""
        return [task for task in self.tasks if not task.upstream_task_ids]

    @property
    def leaves(self) -> list[BaseOperator]:
        """The tasks without downstream tasks."""
        return [task for task in self.tasks if not task.downstream_task_ids]

    def add_task(self, task: BaseOperator) -> None:
        """Add a task that does not belong to a DAG yet."""
        task.dag = self

    def has_task(self, task_id: str) -> bool:
        """Return whether the DAG has a task with this id."""
        return task_id in self.task_dict

    def get_task(self, task_id: str) -> BaseOperator:
        """Return the task with this id.

        Raises:
            DagError: The DAG has no such task.
        """
        try:
            return self.task_dict[task_id]
        except KeyError:
            known = arguments.suggest(task_id, sorted(self.task_dict)) if self.task_dict else "it has no tasks"
            raise DagError(f"DAG {self.dag_id!r} has no task {task_id!r}; {known}") from None

    def reserve_id(self, wanted: str, *, suffix: bool = False) -> str:
        """Return an unused id for a new task or group.

        Args:
            wanted: The preferred id.
            suffix: Whether to append a number if the id is in use.

        Raises:
            DuplicateTaskIdError: The id is in use, and `suffix` is False.
        """
        if len(wanted) > arguments.MAX_ID_LENGTH:
            raise DagError(
                f"DAG {self.dag_id!r}: the id {wanted[:40]!r}... has {len(wanted)} characters, including its groups; "
                f"at most {arguments.MAX_ID_LENGTH} are allowed"
            )
        if not self._has_id(wanted):
            return wanted
        if not suffix:
            what = "task" if wanted in self.task_dict else "group"
            raise DuplicateTaskIdError(f"DAG {self.dag_id!r} already has a {what} {wanted!r}; choose another id")
        number = 1
        while self._has_id(f"{wanted}__{number}"):
            number += 1
        return f"{wanted}__{number}"

    def _has_id(self, name: str) -> bool:
        return name in self.task_dict or name in self.groups

    def find_relatives(self, task_id: str, *, upstream: bool = False) -> set[str]:
        """Return the ids of all tasks downstream of a task, or upstream of it if `upstream` is True."""
        return find_relatives(self.links, task_id, upstream=upstream) & self.task_dict.keys()

    @property
    def mapped_groups(self) -> list[MappedTaskGroup]:
        """The mapped groups, in the order of their creation."""
        return [group for group in self.groups.values() if isinstance(group, MappedTaskGroup)]

    @property
    def links(self) -> Mapping[str, Linked]:
        """The edges of the tasks; a mapped group is between its sources and its tasks."""
        groups = {group.group_id: group for group in self.mapped_groups}
        if not groups:
            return self.task_dict
        inside = {name: [task.task_id for task in group.iter_tasks()] for name, group in groups.items()}
        return add_groups(self.task_dict, {name: (groups[name].source_ids, inside[name]) for name in groups})

    def validate(self) -> None:
        """Check everything that can only be checked once all tasks exist.

        Raises:
            DagError: The dependencies form a cycle, a setup is used incorrectly, a scheduled run would lack a param, a
                mapped task was begun with `partial` and not completed, or a task cannot run in its mapped group.
        """
        for partial in self.partials:
            if not partial.is_expanded:
                raise DagError(
                    f"task {partial.task_id!r}: partial() alone creates no task; call .expand(...) on it, or remove it"
                )
        if self.timetable.kind != "none":
            for name, param in self.params.items():
                if not param.has_default:
                    raise DagError(
                        f"DAG {self.dag_id!r}: param {name!r} has no default, which scheduled runs need; give it a "
                        "default, or set schedule=None"
                    )
        check_cycles(self.dag_id, self.links)
        for group in self.mapped_groups:
            group.check()
        for task in self.tasks:
            if not task.is_setup:
                continue
            for after in task.downstream_list:
                if not after.is_teardown and after.trigger_rule != "all_success":
                    raise DagError(
                        f"task {after.task_id!r} directly follows the setup {task.task_id!r}; its trigger_rule must be "
                        f"'all_success', not {after.trigger_rule!r}"
                    )
        _check_default_args(self)

    def param(self, name: str, default: Any = None) -> DagParam:
        """Return a param of the run, to pass to tasks; a param that does not exist is added with the default."""
        self.params.setdefault(name, Param(default))
        return DagParam(name)

    def __enter__(self) -> DAG:
        """Open the DAG: tasks created inside the block belong to it."""
        open_dags.push(self)
        open_groups.push(self.task_group)
        note_dag(self)
        return self

    def __exit__(self, *_: object) -> None:
        open_groups.pop()
        open_dags.pop()

    def __repr__(self) -> str:
        return f"<DAG {self.dag_id!r}>"


#: Arguments of Airflow's tasks that have no use here but that existing files set in `default_args`.
_IGNORED = frozenset({"owner", "email", "email_on_failure", "email_on_retry", "start_date", "end_date"})


def _check_default_args(dag: DAG) -> None:
    """Reject an argument that no task has but that resembles one of a task: it is probably misspelt."""
    from tidemill.dags.operator_arguments import list_names

    known = set(list_names(BaseOperator, BaseOperator)[0])
    for kind in {kind for task in dag.tasks for kind in (type(task), getattr(task, "operator_class", BaseOperator))}:
        known |= list_names(kind, BaseOperator)[0]
    for name in dag.default_args:
        if name not in known and name not in _IGNORED:
            advice = arguments.suggest(name, sorted(known))
            if advice.startswith("did you mean"):
                raise DagError(f"DAG {dag.dag_id!r}: no task accepts {name!r} of default_args; {advice}")


@overload
def dag(function: Callable[..., Any], /) -> Callable[..., DAG]: ...
@overload
def dag(dag_id: str | None = None, /, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., DAG]]: ...
def dag(dag_id: Any = None, /, **options: Any) -> Any:
    """Turn a function that creates tasks into one that creates a DAG with those tasks when it is called.

    The arguments of the function become params of the runs.

    Args:
        dag_id: The id of the DAG; by default the name of the function.
        options: The other arguments of `DAG`.
    """
    if callable(dag_id):
        return _decorate(dag_id, None, {})
    return functools.partial(_decorate, dag_id=options.pop("dag_id", dag_id), options=options)


def _decorate(function: Callable[..., Any], dag_id: str | None, options: dict[str, Any]) -> Callable[..., DAG]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> DAG:
        bound = signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        shown = {"doc_md": inspect.getdoc(function), **options}
        with DAG(dag_id or function.__name__, **shown) as created:
            passed = {}
            for name, parameter in signature.parameters.items():
                value = bound.arguments.get(name, parameter.empty)
                if name not in created.params:
                    param = Param() if value is parameter.empty else value
                    may_lack = created.timetable.kind == "none"
                    created.params |= wrap_params(f"DAG {created.dag_id!r}", {name: param}, may_lack=may_lack)
                passed[name] = DagParam(name)
            function(**passed)
        return created

    return create
