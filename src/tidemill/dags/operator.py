"""What a task is: an operator, created with its arguments while a file is read, and executed when it is its turn.

Invariants: everything that can be wrong with the arguments is said while the file is read, with the id of the task and
the name of the argument; creating an operator draws the edges from the tasks whose output its arguments have.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from tidemill.dags import arguments
from tidemill.dags.arguments import check_bool, check_int, check_optional_int, check_text
from tidemill.dags.edges import TaskNode, connect
from tidemill.dags.exceptions import DagError, TaskDeferred
from tidemill.dags.group import TaskGroup, find_open_group
from tidemill.dags.operator_arguments import check_names, collect_defaults, name_task
from tidemill.dags.params import Param, wrap_params
from tidemill.dags.scope import open_dags, open_teardowns
from tidemill.dags.trigger_text import check_triggers
from tidemill.dags.xcom_arg import PLAIN_TYPES, PlainXComArg, list_outputs

TRIGGER_RULES = (
    "all_success",
    "all_failed",
    "all_done",
    "all_done_min_one_success",
    "all_done_setup_success",
    "all_skipped",
    "one_success",
    "one_failed",
    "one_done",
    "none_failed",
    "none_failed_min_one_success",
    "none_skipped",
    "always",
)
WEIGHT_RULES = ("downstream", "upstream", "absolute")
DEFAULT_RETRY_DELAY = timedelta(seconds=300)
MAX_RETRY_DELAY = timedelta(days=1)
Callbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None


class OperatorMeta(abc.ABCMeta):
    """Creates operators: fills in `default_args` first, and draws edges afterwards."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        """Create an operator."""
        owner = name_task(kwargs.get("task_id"))
        if args:
            raise DagError(f"{owner}: {cls.__name__} takes no positional arguments; write name=value")
        given = dict(kwargs)
        defaults = collect_defaults(given)
        names = check_names(cls, owner, given, BaseOperator)
        filled = {**{name: value for name, value in defaults.items() if name in names}, **given}
        try:
            operator = super().__call__(**filled)
        except TypeError as error:
            # An argument that is missing; the message of Python names it, but not the task.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise DagError(f"{owner}: {error}") from error
        operator._finish(filled)
        return operator


class BaseOperator(TaskNode, metaclass=OperatorMeta):
    """Base of all operators; override `execute`.

    Args:
        task_id: The id of the task, without those of its groups.
        doc_md: Its documentation, in Markdown.
        task_display_name: What people see instead of its id.
        retries: How many tries may follow the first one.
        retry_delay: The pause before a retry, as a timedelta or in seconds.
        retry_exponential_backoff: Whether the pauses grow.
        max_retry_delay: The longest pause; by default a day.
        execution_timeout: How long a try may take, over deferrals and queues; None: any time.
        pool: The pool that it takes slots from.
        pool_slots: How many.
        priority_weight: Tasks with more go first.
        weight_rule: Whether the weights of tasks `downstream` are added, those `upstream`, or none (`absolute`).
        queue: Which workers may run it.
        trigger_rule: Which ends of the tasks before it let it run.
        depends_on_past: Whether it waits for its instance in the run before to succeed, or to be skipped.
        wait_for_downstream: Whether it waits for the tasks directly after that instance, too.
        max_active_tis_per_dag: How many instances of it may be active, in all runs.
        max_active_tis_per_dagrun: How many in each run.
        do_xcom_push: Whether what it returns is kept for other tasks.
        multiple_outputs: Whether it returns a dict, each value of which is kept under its key as well.
        on_execute_callback: Called with the context before a try.
        on_success_callback: Called with the context after the task succeeded.
        on_failure_callback: Called with the context after it failed.
        on_retry_callback: Called with the context after a try failed that another one follows.
        on_skipped_callback: Called with the context after it was skipped.
        params: Parameters, over those of the DAG.
        default_args: Arguments that it has unless they are given, over those of its groups and the DAG.
        dag: Its DAG; by default the one that is open.
        task_group: The group that it is in; by default the one that is open.

    Attributes:
        template_fields: The names of attributes that are rendered as templates before `execute`.
        template_ext: Values of these endings are names of files that contain the template.

    Raises:
        DagError: An argument is wrong.
    """

    template_fields: Sequence[str] = ()
    template_ext: Sequence[str] = ()
    template_fields_renderers: ClassVar[Mapping[str, str]] = {}
    ui_color: str = "#fff"
    ui_fgcolor: str = "#000"
    is_sensor: ClassVar[bool] = False
    soft_fail: bool = False
    never_fail: bool = False

    def __init__(
        self,
        *,
        task_id: str,
        doc_md: str | None = None,
        task_display_name: str | None = None,
        retries: int | None = 0,
        retry_delay: timedelta | float = DEFAULT_RETRY_DELAY,
        retry_exponential_backoff: bool = False,
        max_retry_delay: timedelta | float | None = None,
        execution_timeout: timedelta | None = None,
        pool: str | None = None,
        pool_slots: int = 1,
        priority_weight: int = 1,
        weight_rule: str = "downstream",
        queue: str = "default",
        trigger_rule: str = "all_success",
        depends_on_past: bool = False,
        wait_for_downstream: bool = False,
        max_active_tis_per_dag: int | None = None,
        max_active_tis_per_dagrun: int | None = None,
        do_xcom_push: bool = True,
        multiple_outputs: bool = False,
        on_execute_callback: Callbacks = None,
        on_success_callback: Callbacks = None,
        on_failure_callback: Callbacks = None,
        on_retry_callback: Callbacks = None,
        on_skipped_callback: Callbacks = None,
        params: Mapping[str, Any] | None = None,
        default_args: Mapping[str, Any] | None = None,
        dag: Any = None,
        task_group: TaskGroup | None = None,
    ) -> None:
        """Check the arguments, and join the DAG and the group that are open."""
        arguments.check_id("task_id", task_id)
        name = f"task {task_id!r}"
        self.upstream_task_ids, self.downstream_task_ids = set(), set()
        self.is_setup = self.is_teardown = self.on_failure_fail_dagrun = False
        self.doc_md = None if doc_md is None else check_text(name, "doc_md", doc_md, empty=True)
        self.task_display_name = (
            "" if task_display_name is None else check_text(name, "task_display_name", task_display_name)
        )
        self.retries = check_int(name, "retries", 0 if retries is None else retries, 0)
        self.retry_delay = arguments.check_duration(name, "retry_delay", retry_delay, zero=True)
        self.retry_exponential_backoff = check_bool(name, "retry_exponential_backoff", retry_exponential_backoff)
        longest = MAX_RETRY_DELAY if max_retry_delay is None else max_retry_delay
        self.max_retry_delay = arguments.check_duration(name, "max_retry_delay", longest, zero=True)
        self.execution_timeout = arguments.check_optional_duration(name, "execution_timeout", execution_timeout)
        self.pool = check_text(name, "pool", "default_pool" if pool is None else pool)
        self.pool_slots = check_int(name, "pool_slots", pool_slots, 1)
        self.priority_weight = check_int(name, "priority_weight", priority_weight, -(1 << 31))
        self.weight_rule = arguments.check_choice(name, "weight_rule", weight_rule, WEIGHT_RULES)
        self.queue = check_text(name, "queue", queue)
        self.trigger_rule = arguments.check_choice(name, "trigger_rule", trigger_rule, TRIGGER_RULES)
        self.wait_for_downstream = check_bool(name, "wait_for_downstream", wait_for_downstream)
        self.depends_on_past = check_bool(name, "depends_on_past", depends_on_past) or self.wait_for_downstream
        self.max_active_tis_per_dag = check_optional_int(name, "max_active_tis_per_dag", max_active_tis_per_dag, 1)
        per_run = check_optional_int(name, "max_active_tis_per_dagrun", max_active_tis_per_dagrun, 1)
        self.max_active_tis_per_dagrun = per_run
        self.do_xcom_push = check_bool(name, "do_xcom_push", do_xcom_push)
        self.multiple_outputs = check_bool(name, "multiple_outputs", multiple_outputs)
        self.on_execute_callback = arguments.check_callbacks(name, "on_execute_callback", on_execute_callback)
        self.on_success_callback = arguments.check_callbacks(name, "on_success_callback", on_success_callback)
        self.on_failure_callback = arguments.check_callbacks(name, "on_failure_callback", on_failure_callback)
        self.on_retry_callback = arguments.check_callbacks(name, "on_retry_callback", on_retry_callback)
        self.on_skipped_callback = arguments.check_callbacks(name, "on_skipped_callback", on_skipped_callback)
        self.params: dict[str, Param] = wrap_params(name, params)
        self._dag: Any = None
        self.task_group: TaskGroup | None = task_group
        self.label = task_id
        self.task_id = task_id
        found = dag or (task_group.dag if task_group else None) or open_dags.current
        if found is not None:
            self.dag = found

    # -- its place in the DAG ------------------------------------------------------------------------------------------

    @property
    def dag(self) -> Any:
        """Its DAG; None: it has none yet."""
        return self._dag

    @dag.setter
    def dag(self, dag: Any) -> None:
        if self._dag is dag:
            return
        if self._dag is not None:
            raise DagError(f"task {self.task_id!r} is in DAG {self._dag.dag_id!r} already")
        self.task_group = self.task_group or find_open_group(dag)
        self.task_id = dag.reserve_id(self.task_group.prefix_id(self.label))
        self._dag = dag
        self.task_group.children[self.task_id] = self
        dag.task_dict[self.task_id] = self

    @property
    def dag_id(self) -> str:
        """The id of its DAG."""
        return self._dag.dag_id if self._dag is not None else ""

    @property
    def output(self) -> PlainXComArg:
        """What it returns, as an argument for other tasks."""
        return PlainXComArg(self)

    @property
    def upstream_list(self) -> list[BaseOperator]:
        """The tasks directly before it."""
        return [self._dag.task_dict[name] for name in sorted(self.upstream_task_ids)]

    @property
    def downstream_list(self) -> list[BaseOperator]:
        """The tasks directly after it."""
        return [self._dag.task_dict[name] for name in sorted(self.downstream_task_ids)]

    def get_flat_relative_ids(self, *, upstream: bool = False) -> set[str]:
        """Return the ids of all tasks after it; `upstream`: before it."""
        return self._dag.find_relatives(self.task_id, upstream=upstream) if self._dag is not None else set()

    def _finish(self, given: Mapping[str, Any]) -> None:
        """Draw the edges from the tasks whose output the arguments have, and check triggers among them."""
        owner = f"task {self.task_id!r}"
        for field in self.template_fields:
            if not hasattr(self, field):
                raise DagError(f"{owner}: {field!r} is in template_fields, but {type(self).__name__} does not set it")
            for output in list_outputs(owner, field, getattr(self, field)):
                for task in output.iter_tasks():
                    connect(task, self)
        for name, value in given.items():
            if type(value) not in PLAIN_TYPES and name not in self.template_fields and name not in _NO_OUTPUTS:
                self._check_no_outputs(owner, name, value)
        check_triggers(owner, given)
        teardown = open_teardowns.current
        if teardown is not None and teardown is not self:
            teardown.enclose(self)

    def _check_no_outputs(self, owner: str, name: str, value: Any) -> None:
        """Refuse outputs of tasks in an argument that no template field holds: nothing would replace them."""
        for output in list_outputs(owner, name, value):
            if not all(task.task_id in self.upstream_task_ids for task in output.iter_tasks()):
                raise DagError(
                    f"{owner}: argument {name!r} is the output of a task, which is known only when that has run; add "
                    f"{name!r} to template_fields of {type(self).__name__}"
                )

    # -- setup and teardown --------------------------------------------------------------------------------------------

    def as_setup(self) -> BaseOperator:
        """Make it a setup: the tasks in its scope run only if it succeeded."""
        if self.is_teardown:
            raise DagError(f"task {self.task_id!r} is a teardown; it cannot be a setup as well")
        self.is_setup = True
        return self

    def as_teardown(
        self,
        *,
        setups: BaseOperator | PlainXComArg | Iterable[Any] | None = None,
        on_failure_fail_dagrun: bool | None = None,
    ) -> BaseOperator:
        """Make it a teardown: it runs after the tasks in its scope, however they end, if a setup succeeded.

        Args:
            setups: The setups whose scope it ends.
            on_failure_fail_dagrun: Whether its failure makes the run fail.
        """
        if self.is_setup:
            raise DagError(f"task {self.task_id!r} is a setup; it cannot be a teardown as well")
        if self.trigger_rule not in ("all_success", "all_done_setup_success"):
            raise DagError(f"task {self.task_id!r}: trigger_rule of a teardown cannot be set; leave it out")
        self.is_teardown = True
        self.trigger_rule = "all_done_setup_success"
        if on_failure_fail_dagrun is not None:
            owner = f"task {self.task_id!r}"
            self.on_failure_fail_dagrun = check_bool(owner, "on_failure_fail_dagrun", on_failure_fail_dagrun)
        several = [] if setups is None else setups if isinstance(setups, list | tuple | set) else [setups]
        for setup in several:
            connect(resolve_task(setup).as_setup(), self)
        return self

    def enclose(self, task: BaseOperator) -> None:
        """Put a task between the setups of this teardown and itself."""
        if task.is_setup or task.is_teardown or task.task_id in self.upstream_task_ids:
            return
        connect(task, self)
        for setup in self.upstream_list:
            if setup.is_setup and setup is not task:
                connect(setup, task)

    def __enter__(self) -> BaseOperator:
        """Open the scope of a teardown: the tasks created inside are between its setups and itself."""
        if not self.is_teardown:
            raise DagError(f"task {self.task_id!r} is not a teardown; `with` needs `task.as_teardown(setups=...)`")
        open_teardowns.push(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the scope."""
        open_teardowns.pop()

    # -- what users override and call ----------------------------------------------------------------------------------

    @property
    def log(self) -> logging.Logger:
        """The logger of the task."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")

    def execute(self, context: Any) -> Any:
        """Do the work; what it returns is kept for other tasks.

        Args:
            context: What `get_current_context` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    def on_kill(self) -> None:
        """End what `execute` has started elsewhere; called when the attempt is ended from outside.

        A user cleared, marked or cancelled the task; it took longer than its `execution_timeout`; or its worker stopped
        and waits no longer: then the attempt is repeated.
        """
        return

    def pre_execute(self, context: Any) -> None:
        """Do something before `execute`."""
        return

    def post_execute(self, context: Any, result: Any = None) -> None:
        """Do something after `execute`."""
        return

    def defer(
        self,
        *,
        trigger: Any,
        method_name: str,
        kwargs: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
    ) -> NoReturn:
        """End this attempt; the task continues in a method once a trigger has fired.

        Args:
            trigger: What to wait for.
            method_name: The method, called on a new instance with the context, `kwargs` and the payload as `event`.
            kwargs: More arguments of the method.
            timeout: How long the trigger may take; None: any time.

        Raises:
            TaskDeferred: Always.
        """
        raise TaskDeferred(trigger=trigger, method_name=method_name, kwargs=kwargs, timeout=timeout)

    def __repr__(self) -> str:
        """Show the class and the id."""
        return f"<{type(self).__name__} {self.task_id!r}>"


_NO_OUTPUTS = frozenset({"dag", "task_group", "default_args"})


def resolve_task(task: Any) -> BaseOperator:
    """Return the task of a task or of its output."""
    task = task.operator if isinstance(task, PlainXComArg) else task
    if not isinstance(task, BaseOperator):
        raise DagError(f"{task!r} is not a task")
    return task
