"""A DAG: tasks that wait for each other, and when they run.

Invariants: the ids of tasks and groups are different; `validate` has been called before anything but the file itself
reads a DAG.
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
from tidemill.dags.operator import BaseOperator, Callbacks
from tidemill.dags.order import check_cycles, find_relatives
from tidemill.dags.params import Param, wrap_params
from tidemill.dags.schedule import Schedule, describe_schedule
from tidemill.dags.scope import note_dag, open_dags, open_groups
from tidemill.dags.xcom_arg import DagParam


class DAG:
    """Tasks that wait for each other; those created inside `with DAG(...)` are in it.

    Args:
        dag_id: Its id.
        description: What it does, in a line, for people.
        schedule: When it runs by itself: a cron expression, `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`,
            `@once`, a timedelta; None: never.
        start_date: The first time that may be due; a cron expression is read in its time zone, by default UTC.
        end_date: The last time that may be due.
        catchup: Whether times that passed before the DAG was known, or while it was paused, are made up for.
        max_active_runs: How many of its runs may be active.
        max_active_tasks: How many of its tasks may be active, in all runs; None: any number.
        dagrun_timeout: How long a run may take; None: any time.
        default_args: Arguments of its tasks that do not have them.
        params: Parameters of its runs: defaults, or `Param`s.
        tags: For people who look for it.
        doc_md: Its documentation, in Markdown.
        dag_display_name: What people see instead of its id.
        fail_fast: Whether the first failure skips what has not started.
        on_success_callback: Called with the context after a run succeeded.
        on_failure_callback: Called with the context after a run failed.
        user_defined_macros: More names for templates.
        user_defined_filters: More filters for templates.
        template_searchpath: Folders of files with templates, beside the folder of the DAG file.
        render_template_as_native_obj: Whether templates become Python values instead of texts.

    Raises:
        DagError: An argument is wrong.
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
        """Check the arguments."""
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
        # Many DAGs of Airflow have it among the arguments of their tasks.
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
        self.edge_labels: dict[tuple[str, str], str] = {}
        self.task_group = TaskGroup(None, dag=self)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[BaseOperator]:
        """The tasks, in the order in which they were created."""
        return list(self.task_dict.values())

    @property
    def task_ids(self) -> list[str]:
        """Their ids."""
        return list(self.task_dict)

    @property
    def roots(self) -> list[BaseOperator]:
        """The tasks that come after no other."""
        return [task for task in self.tasks if not task.upstream_task_ids]

    @property
    def leaves(self) -> list[BaseOperator]:
        """The tasks that no other comes after."""
        return [task for task in self.tasks if not task.downstream_task_ids]

    def add_task(self, task: BaseOperator) -> None:
        """Add a task that is in no DAG yet."""
        task.dag = self

    def has_task(self, task_id: str) -> bool:
        """Return whether there is a task with this id."""
        return task_id in self.task_dict

    def get_task(self, task_id: str) -> BaseOperator:
        """Return a task.

        Raises:
            DagError: There is none.
        """
        try:
            return self.task_dict[task_id]
        except KeyError:
            known = arguments.suggest(task_id, sorted(self.task_dict)) if self.task_dict else "it has no tasks"
            raise DagError(f"DAG {self.dag_id!r} has no task {task_id!r}; {known}") from None

    def reserve_id(self, wanted: str, *, suffix: bool = False) -> str:
        """Return the id for a new task or group.

        Args:
            wanted: The id.
            suffix: Whether a number is added if it exists.

        Raises:
            DuplicateTaskIdError: It exists.
        """
        if len(wanted) > arguments.MAX_ID_LENGTH:
            raise DagError(
                f"DAG {self.dag_id!r}: the id {wanted[:40]!r}... has {len(wanted)} characters with its groups; "
                f"at most {arguments.MAX_ID_LENGTH} are allowed"
            )
        if not self._has_id(wanted):
            return wanted
        if not suffix:
            what = "task" if wanted in self.task_dict else "group"
            raise DuplicateTaskIdError(
                f"DAG {self.dag_id!r}: there is a {what} {wanted!r} already; give this one another id"
            )
        number = 1
        while self._has_id(f"{wanted}__{number}"):
            number += 1
        return f"{wanted}__{number}"

    def _has_id(self, name: str) -> bool:
        return name in self.task_dict or name in self.groups

    def find_relatives(self, task_id: str, *, upstream: bool = False) -> set[str]:
        """Return the ids of all tasks after one; `upstream`: before it."""
        return find_relatives(self.task_dict, task_id, upstream=upstream)

    def validate(self) -> None:
        """Check what can only be seen once all tasks are there.

        Raises:
            DagError: Tasks wait for each other in a circle, a setup is used wrongly, a run by schedule would lack a
                param, or a task is to start from a trigger.
        """
        if self.timetable.kind != "none":
            for name, param in self.params.items():
                if not param.has_default:
                    raise DagError(
                        f"DAG {self.dag_id!r}: param {name!r} has no default, so no run by schedule can have it; "
                        "give it a default, or the DAG no schedule"
                    )
        check_cycles(self.dag_id, self.task_dict)
        for task in self.tasks:
            if getattr(task, "start_from_trigger", False):
                raise DagError(
                    f"task {task.task_id!r}: start_from_trigger is not supported; set it to False, and let execute "
                    "defer to the trigger"
                )
            if not task.is_setup:
                continue
            for after in task.downstream_list:
                if not after.is_teardown and after.trigger_rule != "all_success":
                    raise DagError(
                        f"task {after.task_id!r}: directly after the setup {task.task_id!r} its trigger_rule must be "
                        f"'all_success', not {after.trigger_rule!r}"
                    )
        _check_default_args(self)

    def param(self, name: str, default: Any = None) -> DagParam:
        """Return a parameter of the run, to be passed to tasks; it is added if there is none of that name."""
        self.params.setdefault(name, Param(default))
        return DagParam(name)

    def __enter__(self) -> DAG:
        """Open it: tasks created from now on are in it."""
        open_dags.push(self)
        open_groups.push(self.task_group)
        note_dag(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        open_groups.pop()
        open_dags.pop()

    def __repr__(self) -> str:
        """Show its id."""
        return f"<DAG {self.dag_id!r}>"


#: What tasks have in Airflow, and is of no use here; the files of users have them among `default_args`.
_IGNORED = frozenset({"owner", "email", "email_on_failure", "email_on_retry", "start_date", "end_date"})


def _check_default_args(dag: DAG) -> None:
    """Refuse what is probably a misspelt argument: no task has it, but all have one that is similar."""
    from tidemill.dags.operator_arguments import list_names

    known = set(list_names(BaseOperator, BaseOperator)[0])
    for kind in {type(task) for task in dag.tasks}:
        known |= list_names(kind, BaseOperator)[0]
    for name in dag.default_args:
        if name not in known and name not in _IGNORED:
            advice = arguments.suggest(name, sorted(known))
            if advice.startswith("did you mean"):
                raise DagError(f"DAG {dag.dag_id!r}: default_args has {name!r}, which no task has; {advice}")


@overload
def dag(function: Callable[..., Any], /) -> Callable[..., DAG]: ...
@overload
def dag(dag_id: str | None = None, /, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., DAG]]: ...
def dag(dag_id: Any = None, /, **options: Any) -> Any:
    """Turn a function that creates tasks into one that creates a DAG with them when it is called.

    The arguments of the function are parameters of the runs.

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
