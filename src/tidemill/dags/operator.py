"""The base of all operators: created with their arguments when a file is parsed, executed when their task runs.

Invariants: every invalid argument is reported when the file is parsed, with the id of the task and the name of the
argument; creating an operator adds edges from the tasks whose outputs are among its arguments.
"""

from __future__ import annotations

import abc
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from tidemill.dags.triggers.trigger_text import check_triggers
from tidemill.dags.xcom_arg import PLAIN_TYPES, MappedArgument, PlainXComArg, list_outputs
from tidemill.triggers.base import StartTriggerArgs

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
    """Metaclass of operators: applies `default_args` before the constructor, and adds edges after it."""

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        owner = name_task(kwargs.get("task_id"))
        if args:
            raise DagError(f"{owner}: {cls.__name__} accepts no positional arguments; pass them by name")
        given = dict(kwargs)
        defaults = collect_defaults(given)
        names = check_names(cls, owner, given, BaseOperator)
        filled = {**{name: value for name, value in defaults.items() if name in names}, **given}
        try:
            operator = super().__call__(**filled)
        except TypeError as error:
            # A missing argument: Python's message names the argument but not the task.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise DagError(f"{owner}: {error}") from error
        operator._finish(filled)
        return operator


class BaseOperator(TaskNode, metaclass=OperatorMeta):
    """Base of all operators; override `execute`.

    Args:
        task_id: The id of the task, without the prefixes of its groups.
        doc_md: The documentation of the task, in Markdown.
        task_display_name: The name to show instead of the id.
        retries: How many retries may follow the first try.
        retry_delay: The delay before a retry, as a timedelta or in seconds.
        retry_exponential_backoff: Whether the delay grows exponentially.
        max_retry_delay: The longest delay; by default one day.
        execution_timeout: How long a try may take, including deferrals and time in queues; None: no limit.
        pool: The pool that the task takes slots from.
        pool_slots: The number of slots that the task takes.
        priority_weight: The priority of the task; higher weights run first.
        weight_rule: Which weights add up to the effective priority: those of all tasks `downstream`, of all tasks
            `upstream`, or none (`absolute`).
        queue: The queue; only workers of this queue run the task.
        trigger_rule: The condition on the states of the direct upstream tasks under which the task runs.
        depends_on_past: Whether the task waits until its instance in the previous run has succeeded or was skipped.
        wait_for_downstream: Whether the task also waits for the direct downstream tasks of that instance.
        max_active_tis_per_dag: How many instances of the task may be active at once across all runs.
        max_active_tis_per_dagrun: How many instances may be active at once in one run.
        do_xcom_push: Whether to store the return value for other tasks.
        multiple_outputs: Whether the task returns a dict whose values are also stored under their own keys.
        on_execute_callback: Called with the context before each try.
        on_success_callback: Called with the context after the task has succeeded.
        on_failure_callback: Called with the context after the task has failed.
        on_retry_callback: Called with the context after a failed try that will be retried.
        on_skipped_callback: Called with the context after the task was skipped.
        start_from_trigger: Whether each try starts in a trigger instead of a worker, as `start_trigger_args` says;
            `execute` is not called.
        start_trigger_args: The trigger, and the method that resumes the task.
        trigger_kwargs: The arguments of the trigger, instead of those of `start_trigger_args`.
        params: Params that override those of the DAG.
        default_args: Default arguments of this task; they override those of its groups and DAG.
        dag: The DAG; by default the one that is open.
        task_group: The group; by default the one that is open.

    Attributes:
        template_fields: The names of the attributes that are rendered as templates before `execute`.
        template_ext: File name extensions; a value with one of them names a file that contains the template.
        stream_max_events: The most events of a stream that `handle_trigger_events` gets at a time.
        stream_max_wait: How long a batch with fewer events waits for more, in seconds.
        stream_linger: How long an attempt waits for the next event before it leaves its worker, in seconds.
        allow_empty_stream: Whether a stream may end without an event.

    Raises:
        DagError: An argument is invalid.
    """

    template_fields: Sequence[str] = ()
    template_ext: Sequence[str] = ()
    template_fields_renderers: ClassVar[Mapping[str, str]] = {}
    ui_color: str = "#fff"
    ui_fgcolor: str = "#000"
    is_sensor: ClassVar[bool] = False
    is_mapped: ClassVar[bool] = False
    soft_fail: bool = False
    never_fail: bool = False
    #: The template of the label of an element, if the task or its group is mapped.
    map_index_template: str | None = None
    start_from_trigger: bool = False
    start_trigger_args: StartTriggerArgs | None = None
    stream_max_events: int = 100
    stream_max_wait: float = 0.0
    stream_linger: float = 2.0
    allow_empty_stream: bool = False

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
        start_from_trigger: bool | None = None,
        start_trigger_args: StartTriggerArgs | None = None,
        trigger_kwargs: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        default_args: Mapping[str, Any] | None = None,
        dag: Any = None,
        task_group: TaskGroup | None = None,
    ) -> None:
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
        if start_from_trigger is not None:
            self.start_from_trigger = check_bool(name, "start_from_trigger", start_from_trigger)
        self.start_trigger_args = _copy_start(name, start_trigger_args or self.start_trigger_args, trigger_kwargs)
        self.params: dict[str, Param] = wrap_params(name, params)
        self._dag: Any = None
        self.task_group: TaskGroup | None = task_group
        self.label = task_id
        self.task_id = task_id
        found = dag or (task_group.dag if task_group else None) or open_dags.current
        if found is not None:
            self.dag = found

    @classmethod
    def partial(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the operator with the arguments that all elements of a map share, to be completed by `expand`.

        Args:
            args: None; arguments are passed by name.
            kwargs: Arguments of the operator, and those of the map: `max_outstanding`, `max_failed_elements` and
                `map_index_template`, which `tidemill.dags.maps.mapped.MappedOperator` describes.

        Returns:
            A `tidemill.dags.maps.expanding.OperatorPartial`.
        """
        # That module imports this one, and few files need it.
        return importlib.import_module("tidemill.dags.maps.expanding").make_partial(cls, args, kwargs)

    def expand(self, *_args: Any, **_sources: Any) -> NoReturn:
        """Raise an error: a task that exists cannot be mapped, only what `partial` returns."""
        name = self.task_type
        raise DagError(
            f"task {self.task_id!r}: expand() maps no task that {name}(...) has created; write "
            f"{name}.partial(task_id={self.label!r}, ...).expand(...)"
        )

    def iterate(self, *_args: Any, **_sources: Any) -> NoReturn:
        """Raise an error: see `expand`."""
        self.expand()

    def iterate_kwargs(self, *_args: Any, **_sources: Any) -> NoReturn:
        """Raise an error: see `expand`."""
        self.expand()

    def chunk(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise an error: see `expand`."""
        self.expand()

    def expand_kwargs(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise an error: see `expand`."""
        self.expand()

    # -- membership and edges
    # ----------------------------------------------------------------------------------------------

    @property
    def dag(self) -> Any:
        """The DAG of the task; None if it has none yet."""
        return self._dag

    @dag.setter
    def dag(self, dag: Any) -> None:
        if self._dag is dag:
            return
        if self._dag is not None:
            raise DagError(f"task {self.task_id!r} already belongs to DAG {self._dag.dag_id!r}")
        self.task_group = self.task_group or find_open_group(dag)
        self.task_id = dag.reserve_id(self.task_group.prefix_id(self.label))
        self._dag = dag
        self.task_group.children[self.task_id] = self
        dag.task_dict[self.task_id] = self

    @property
    def dag_id(self) -> str:
        """The id of the DAG; empty if the task has none yet."""
        return self._dag.dag_id if self._dag is not None else ""

    @property
    def task_type(self) -> str:
        """The name of the operator's class."""
        return type(self).__name__

    @property
    def is_generator(self) -> bool:
        """Whether the task gives its values one by one, as the ones that handle streams do."""
        return self.handles_streams

    @property
    def feeds_maps(self) -> bool:
        """Whether the events of its trigger are its elements, without a worker."""
        return False

    @property
    def handles_streams(self) -> bool:
        """Whether the operator defines `handle_trigger_events(events, context)`."""
        return callable(getattr(self, "handle_trigger_events", None))

    def set_index_template(self, template: object) -> None:
        """Set `map_index_template`."""
        name = f"task {self.task_id!r}"
        self.map_index_template = None if template is None else check_text(name, "map_index_template", template)

    @property
    def mapped_group(self) -> Any:
        """The `MappedTaskGroup` that the task belongs to, directly or through other groups; None: there is none."""
        return self.task_group.mapped_group if self.task_group is not None else None

    @property
    def has_elements(self) -> bool:
        """Whether the task or its group is mapped, so that a run has an instance of it for each value."""
        return self.is_mapped or self.mapped_group is not None

    @property
    def output(self) -> PlainXComArg:
        """The return value of the task, as an argument for other tasks."""
        return PlainXComArg(self)

    @property
    def upstream_list(self) -> list[BaseOperator]:
        """The direct upstream tasks."""
        return [self._dag.task_dict[name] for name in sorted(self.upstream_task_ids)]

    @property
    def downstream_list(self) -> list[BaseOperator]:
        """The direct downstream tasks."""
        return [self._dag.task_dict[name] for name in sorted(self.downstream_task_ids)]

    def get_flat_relative_ids(self, *, upstream: bool = False) -> set[str]:
        """Return the ids of all tasks downstream of this one, or upstream of it if `upstream` is True."""
        return self._dag.find_relatives(self.task_id, upstream=upstream) if self._dag is not None else set()

    def _finish(self, given: Mapping[str, Any]) -> None:
        """Add edges from the tasks whose outputs are among the arguments, and check triggers among the arguments."""
        owner = f"task {self.task_id!r}"
        for field in self.template_fields:
            if not hasattr(self, field):
                raise DagError(f"{owner}: {field!r} is in template_fields, but {type(self).__name__} does not set it")
            for output in list_outputs(owner, field, getattr(self, field)):
                for task in output.iter_tasks():
                    connect(task, self)
        # `dags.triggers.starting` checks the arguments of a trigger that starts the task.
        elsewhere = {*_NO_OUTPUTS, "trigger_kwargs"} if self.start_from_trigger else _NO_OUTPUTS
        for name, value in given.items():
            if type(value) not in PLAIN_TYPES and name not in self.template_fields and name not in elsewhere:
                self._check_no_outputs(owner, name, value)
        check_triggers(owner, given)
        teardown = open_teardowns.current
        if teardown is not None and teardown is not self:
            teardown.enclose(self)

    def _check_no_outputs(self, owner: str, name: str, value: Any) -> None:
        """Reject task outputs in an argument that is not a template field: nothing would replace them by values."""
        for output in list_outputs(owner, name, value):
            if isinstance(output, MappedArgument):
                raise DagError(
                    f"{owner}: argument {name!r} is {output!r}, which is not known before the task runs; add {name!r} "
                    f"to template_fields of {type(self).__name__}"
                )
            if not all(task.task_id in self.upstream_task_ids for task in output.iter_tasks()):
                raise DagError(
                    f"{owner}: argument {name!r} is the output of a task, which is not known before that task has run; "
                    f"add {name!r} to template_fields of {type(self).__name__}"
                )

    # -- setup and teardown --------------------------------------------------------------------------------------------

    def as_setup(self) -> BaseOperator:
        """Make the task a setup: the tasks in its scope run only if it has succeeded."""
        if self.is_teardown:
            raise DagError(f"task {self.task_id!r} is a teardown and cannot also be a setup")
        self.is_setup = True
        return self

    def as_teardown(
        self,
        *,
        setups: BaseOperator | PlainXComArg | Iterable[Any] | None = None,
        on_failure_fail_dagrun: bool | None = None,
    ) -> BaseOperator:
        """Make the task a teardown: it runs after all tasks in its scope, whatever their state, if a setup succeeded.

        Args:
            setups: The setups whose scope the teardown closes.
            on_failure_fail_dagrun: Whether a failure of the teardown fails the run.
        """
        if self.is_setup:
            raise DagError(f"task {self.task_id!r} is a setup and cannot also be a teardown")
        if self.trigger_rule not in ("all_success", "all_done_setup_success"):
            raise DagError(f"task {self.task_id!r}: a teardown cannot have a trigger_rule; leave it out")
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
        """Add edges that put a task between the setups of this teardown and the teardown."""
        if task.is_setup or task.is_teardown or task.task_id in self.upstream_task_ids:
            return
        connect(task, self)
        for setup in self.upstream_list:
            if setup.is_setup and setup is not task:
                connect(setup, task)

    def __enter__(self) -> BaseOperator:
        """Open the scope of a teardown: tasks created inside the block run between its setups and the teardown."""
        if not self.is_teardown:
            raise DagError(f"task {self.task_id!r} is not a teardown; `with` needs `task.as_teardown(setups=...)`")
        open_teardowns.push(self)
        return self

    def __exit__(self, *_: object) -> None:
        open_teardowns.pop()

    # -- what users override and call ----------------------------------------------------------------------------------

    @property
    def log(self) -> logging.Logger:
        """The logger of the operator's class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")

    def execute(self, context: Any) -> Any:
        """Run the task; the return value is stored for other tasks.

        Args:
            context: The context, as `get_current_context` returns it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    def on_kill(self) -> None:
        """Stop external work that `execute` has started; called when the attempt is stopped from outside.

        That happens when a user clears, marks or cancels the task, when the task exceeds its `execution_timeout`, and
        when its worker shuts down and stops waiting; in the last case the attempt is repeated.
        """
        return

    def pre_execute(self, context: Any) -> None:
        """Hook that runs before `execute`."""
        return

    def post_execute(self, context: Any, result: Any = None) -> None:
        """Hook that runs after `execute`."""
        return

    def defer(
        self,
        *,
        trigger: Any,
        method_name: str = "",
        kwargs: Mapping[str, Any] | None = None,
        timeout: timedelta | float | None = None,
        streaming: bool | None = None,
        idle_timeout: timedelta | float | None = None,
    ) -> NoReturn:
        """End this attempt; a trigger waits, and the task then resumes in another method.

        Args:
            trigger: The trigger to wait for.
            method_name: The method that resumes the task: called on a new instance with the context, `kwargs`, and the
                payload as `event`.
            kwargs: More arguments of the method.
            timeout: How long to wait for the trigger, as a timedelta or in seconds; None: no limit. For a stream, the
                limit of the whole stream.
            streaming: Whether all events of the trigger are delivered, to `handle_trigger_events`, or one by one to the
                method; None: if the operator defines `handle_trigger_events`.
            idle_timeout: How long each event of a stream may take, as a timedelta or in seconds; None: no limit.

        Raises:
            TaskDeferred: Always.
        """
        raise TaskDeferred(
            trigger=trigger,
            method_name=method_name,
            kwargs=kwargs,
            timeout=timeout,
            streaming=streaming,
            idle_timeout=idle_timeout,
        )

    def on_stream_end(self, context: Any) -> Any:
        """Hook that runs after the last event of a stream, or STOP; the value it returns is the XCom of the task."""
        return

    def make_start_args(self) -> StartTriggerArgs | None:
        """Return how the task starts with `start_from_trigger`; called when the file is parsed.

        Override this if the arguments of the trigger follow from those of the operator.
        """
        return self.start_trigger_args

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_id!r}>"


def _copy_start(name: str, args: Any, trigger_kwargs: Any) -> Any:
    """Return the task's own copy, since those of the class are shared by all its tasks."""
    if isinstance(args, StartTriggerArgs):
        kwargs = args.trigger_kwargs if trigger_kwargs is None else trigger_kwargs
        return replace(args, trigger_kwargs=dict(kwargs) if isinstance(kwargs, Mapping) else kwargs)
    if trigger_kwargs is not None:
        raise DagError(f"{name}: trigger_kwargs needs start_trigger_args, which names the trigger; add it")
    return args


_NO_OUTPUTS = frozenset({"dag", "task_group", "default_args"})


def resolve_task(task: Any) -> BaseOperator:
    """Return the task of a task or of a task output."""
    task = task.operator if isinstance(task, PlainXComArg) else task
    if not isinstance(task, BaseOperator):
        raise DagError(f"{task!r} is not a task")
    return task
