"""The running task, as its own code sees it: XComs, earlier runs, its try."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.dags.arguments import check_text
from tidemill.dags.attempt.current import get_current_context
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.lazy_sequence import LazySequence
from tidemill.dags.attempt.task_services import AttemptClaim, TaskServices, XComQuery
from tidemill.dags.context.dag_run import DagRun, build_run, read_moment
from tidemill.dags.exceptions import DagError, LeftOutError, NotFoundError
from tidemill.dags.group_unit import GroupUnit
from tidemill.dags.long_lists import is_mark
from tidemill.dags.xcom_arg import RETURN_VALUE, MappedArgument
from tidemill.runtime.json.codec import decode, encode
from tidemill.runtime.store_clock import STORE_CLOCK

#: The state of the task while each of its callbacks runs.
_STATES: Final = {
    "on_success": "success",
    "on_failure": "failed",
    "on_retry": "up_for_retry",
    "on_skipped": "skipped",
}
_COUNTS = "a task cannot query other tasks and runs; use xcom_pull, get_previous_dagrun or get_dagrun_state"
#: Attributes of Airflow's task instance that are missing here, each with the reason or a replacement.
_LEFT_OUT: Final = {
    **dict.fromkeys(("get_ti_count", "get_dr_count", "get_task_states", "get_task_breadcrumbs"), _COUNTS),
    **dict.fromkeys(("get_previous_ti", "get_previous_start_date", "previous_ti"), _COUNTS),
    "get_relevant_upstream_map_indexes": "use xcom_pull with map_indexes=ti.map_index",
    "rendered_map_index": "map_index_template is rendered after the attempt; render it in the task, or use "
    "ti.map_index",
    **dict.fromkeys(("log_url", "mark_success_url"), "a task does not know the address of the web UI; use ti.key"),
    **dict.fromkeys(("id", "dag_version_id"), "use ti.key to name it, and ti.fencing_token to tell its attempts apart"),
    "execution_date": "Airflow 3 no longer has it; use logical_date",
}


class TaskInstance:
    """The running task, as `context["ti"]`.

    Attributes:
        task: The operator.
        task_id: The id of the task.
        dag_id: The DAG.
        run_id: The run.
        map_index: The index of the element, if the task or its group is mapped; otherwise -1.
        try_number: The number of this try, from 1.
        max_tries: The number of retries that may follow the first try.
        state: `running`; in a callback, the state that the task has reached.
        start_date: When this attempt started; in a callback, when the try started.
        end_date: When the try ended; None if it has not.
        hostname: The machine that the task runs on.
        dag_run: The run.
        fencing_token: A number that rises with each attempt of this task.
        skipped: The ids of the direct downstream tasks that this task skips.
        skips_all: Whether this task skips all tasks downstream of it.
    """

    def __init__(
        self, task: Any, claim: AttemptClaim, services: TaskServices, dag_run: DagRun, params: Mapping[str, Any]
    ) -> None:
        self.task = task
        self.task_id, self.dag_id, self.run_id = claim.task_id, claim.dag_id, claim.run_id
        self.map_index, self.try_number, self.max_tries = claim.map_index, claim.try_number, claim.max_tries - 1
        self.operator = "" if task is None else task.task_type
        self.hostname = socket.gethostname()
        self.queue = claim.queue
        self.state = "running"
        self.start_date = STORE_CLOCK.now()
        self.end_date: datetime | None = None
        if claim.callback is not None:
            self.state = _STATES.get(claim.callback.name, self.state)
            self.end_date = read_moment(claim.callback.ended_us)
            self.start_date = read_moment(claim.callback.started_us) or self.end_date or self.start_date
        self.dag_run = dag_run
        self.logical_date = dag_run.logical_date
        self.fencing_token = claim.epoch
        self.params = params
        self.skipped: set[str] = set()
        self.skips_all = False
        #: The element of the mapped group that the task belongs to; None: it belongs to no mapped group.
        self.unit: GroupUnit | None = None
        self._services = services

    @property
    def duration(self) -> float | None:
        """The seconds that the try took; None if it has not ended."""
        return None if self.end_date is None else (self.end_date - self.start_date).total_seconds()

    def xcom_push(self, key: str, value: Any) -> None:
        """Store a value for other tasks at once.

        Raises:
            DagError: The key is not a string that a store accepts.
            EncodingError: The value cannot be serialized.
        """
        check_text("xcom_push", "key", key)
        self._services.push_xcom(key, encode(value, f"XCom {key!r}"))

    def xcom_pull(
        self,
        task_ids: str | Sequence[str] | None = None,
        dag_id: str | None = None,
        key: str = RETURN_VALUE,
        include_prior_dates: bool = False,
        *,
        map_indexes: int | Iterable[int] | None = None,
        default: Any = None,
        run_id: str | None = None,
    ) -> Any:
        """Return the value that a task stored under a key; for a list of tasks, a list of values.

        The value of a mapped task is a `LazySequence` of what its elements stored, and that of a generator task a
        `LazySequence` of what it yielded. Between tasks of the same mapped group, it is the value of the same run of
        the group; of a generator task of another group, `map_indexes` has to name one.

        Args:
            task_ids: The id of a task, or several; None: this task, and in a mapped task this element.
            dag_id: The DAG; by default this one. For another DAG, the run is the latest one that is not later than this
                run, unless `run_id` names it.
            key: The key; by default the one of the task's return value.
            include_prior_dates: Whether to look in earlier runs for a value that this run does not have.
            map_indexes: The index of an element of a mapped task; for several, the result is a list of values. None:
                all elements; with `task_ids` None, this instance; of a task of the same mapped group, the same index.
            default: The value to return where nothing is stored.
            run_id: The run; by default this one.
        """
        other_dag = None if dag_id == self.dag_id else dag_id
        other_run = None if other_dag is None and run_id == self.run_id else run_id
        names = (self.task_id,) if task_ids is None else (task_ids,) if isinstance(task_ids, str) else tuple(task_ids)
        is_single = task_ids is None or isinstance(task_ids, str)
        if map_indexes is not None:
            indexes = (map_indexes,) if isinstance(map_indexes, int) else tuple(map_indexes)
            is_single = is_single and isinstance(map_indexes, int)
        else:
            indexes = (self.map_index if task_ids is None else UNMAPPED,)
        is_here = other_dag is None and other_run is None and map_indexes is None
        unit = frozenset(name for name in names if is_here and self._is_in_unit(name))
        values: list[Any] = []
        for index in indexes:
            yielded = {
                name: self.map_index if name in unit else index
                for name in names
                if self._yields_in_elements(name, key, other_dag)
            }
            _check_named(yielded)
            others = [name for name in names if name not in yielded]
            lazy = {
                name for name in others if index < 0 and name not in unit and self._has_elements(name, key, other_dag)
            }
            for name in sorted({*lazy, *yielded}):
                _check_prior(name, include_prior_dates)
            texts: dict[str, str | None] = {}
            # The value that `on_stream_end` returned takes the place of what a streaming task emitted.
            streams = {name for name in lazy if getattr(self._find_task(name), "handles_streams", False)}
            for at, some in ((index, (set(others) - lazy - unit) | streams), (self.map_index, unit)):
                asked = tuple(name for name in dict.fromkeys(others) if name in some)
                if asked:
                    query = XComQuery(asked, key, at, include_prior_dates, other_dag, other_run)
                    found = self._services.get_xcom(query)
                    texts |= zip(asked, found, strict=True)
            for name in names:
                if name in yielded:
                    values.append(LazySequence(self._services, name, key, other_dag, other_run, yielded[name]))
                    continue
                text = texts.get(name)
                if text is not None and not is_mark(text):
                    values.append(decode(text))
                    continue
                if text is not None:
                    lazy.add(name)
                    _check_prior(name, include_prior_dates)
                sequence = LazySequence(self._services, name, key, other_dag, other_run)
                may_have = index == UNMAPPED and other_dag is not None and not include_prior_dates
                values.append(sequence if name in lazy or (may_have and len(sequence)) else default)
        return values[0] if is_single else values

    def _find_task(self, task_id: str) -> Any:
        """Return a task of this DAG; None if it has no such task."""
        dag = getattr(self.task, "dag", None)
        return None if dag is None else dag.task_dict.get(task_id)

    def _is_in_unit(self, task_id: str) -> bool:
        """Return whether a task belongs to the same mapped group as this one."""
        group = None if self.task is None else self.task.mapped_group
        return group is not None and getattr(self._find_task(task_id), "mapped_group", None) is group

    def _has_elements(self, task_id: str, key: str, dag_id: str | None) -> bool:
        """Return whether a task is known to store a sequence under a key; those of other DAGs are not known."""
        task = None if dag_id is not None else self._find_task(task_id)
        if task is None:
            return False
        return task.has_elements or (task.is_generator and key == RETURN_VALUE)

    def _yields_in_elements(self, task_id: str, key: str, dag_id: str | None) -> bool:
        """Return whether a task is known to be a generator of a mapped group, which yields in each element."""
        task = None if dag_id is not None or key != RETURN_VALUE else self._find_task(task_id)
        return task is not None and task.has_elements and task.is_generator and not task.handles_streams

    def get_previous_dagrun(self, state: str | None = None) -> DagRun | None:
        """Return the run of this DAG with the closest earlier logical date; None if there is none.

        Args:
            state: Consider only runs in this state, such as `success`.
        """
        if self.dag_run.logical_date is None:
            return None
        found = self._services.get_earlier_run(state)
        return None if found is None else build_run(found, self._services)

    def get_dagrun_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run.

        Raises:
            NotFoundError: The run does not exist.
        """
        found = self._services.get_run(dag_id, run_id)
        if found is None:
            raise NotFoundError(f"DAG {dag_id!r} has no run {run_id!r}")
        return found.state

    def get_first_reschedule_date(self, context: Any = None) -> None:
        """Return None: a sensor defers between its checks and is never rescheduled."""

    def get_template_context(self) -> Context:
        """Return the context of this attempt."""
        return cast("Context", get_current_context())

    def __getattr__(self, name: str) -> Any:
        """Explain what to use instead of an attribute of Airflow that is missing here."""
        if name in _LEFT_OUT:
            raise LeftOutError(f"a task instance has no {name!r}: {_LEFT_OUT[name]}")
        raise AttributeError(f"a task instance has no {name!r}")

    def read_xcom(self, task_id: str, key: str) -> Any:
        """Return the value of a task output that was passed as an argument."""
        return self.xcom_pull(task_id, key=key)

    def read_argument(self, argument: MappedArgument) -> Any:
        """Return the value of an argument of the mapped group that the task belongs to."""
        if self.unit is None:
            raise DagError(f"{argument!r} has a value only in tasks of that group")
        return self.unit.read(argument)

    def read_sequence(self, task_id: str, key: str) -> LazySequence:
        """Return the output of a mapped task or of a generator task that was passed as an argument."""
        if self._yields_in_elements(task_id, key, None):
            return cast("LazySequence", self.xcom_pull(task_id, key=key))
        return LazySequence(self._services, task_id, key)

    @property
    def key(self) -> str:
        """The task instance's key, for display: DAG, task and run."""
        return f"{self.dag_id}__{format_instance(self.task_id, self.map_index)}__{self.run_id}"

    def __repr__(self) -> str:
        name = format_instance(self.task_id, self.map_index)
        return f"<TaskInstance {self.dag_id}.{name} {self.run_id} try {self.try_number}>"


def _check_named(yielded: Mapping[str, int]) -> None:
    """Raise an error if the values that a generator yielded in all elements of a mapped group are asked for."""
    for name, index in sorted(yielded.items()):
        if index < 0:
            raise DagError(
                f"task {name!r} yields its values in each element of its mapped group; name one with map_indexes, or "
                "return a list from another task of the group"
            )


def _check_prior(task_id: str, include_prior_dates: bool) -> None:
    """Raise an error if a sequence is to be searched for in earlier runs."""
    if include_prior_dates:
        raise DagError(
            f"xcom_pull(include_prior_dates=True) of {task_id!r} is not supported, because it stores a sequence; name "
            "the run with run_id"
        )
