"""What an attempt is told, and whom it asks: the claim that a worker got, and the store behind the worker.

Both are protocols: a worker's process, `tidemill dags test` and tests have their own. Values are texts of
`runtime.codec`, times are UTC microseconds.
"""

from __future__ import annotations

from typing import Protocol


class ResumeClaim(Protocol):
    """How an attempt continues: the method, its encoded arguments, and the encoded event."""

    @property
    def method(self) -> str: ...
    @property
    def kwargs(self) -> str: ...
    @property
    def payload(self) -> str: ...


class CallbackClaim(Protocol):
    """Which callback is to be run; `error`: what made the task or the run fail."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> str | None: ...


class Claim(Protocol):
    """An attempt that is to be made now; `store.calls.ClaimedAttempt` says what each field means."""

    @property
    def task(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def dag_id(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def task_id(self) -> str: ...
    @property
    def map_index(self) -> int: ...
    @property
    def try_number(self) -> int: ...
    @property
    def max_tries(self) -> int: ...
    @property
    def file(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def run_kind(self) -> str: ...
    @property
    def run_started_us(self) -> int: ...
    @property
    def logical_us(self) -> int | None: ...
    @property
    def interval_start_us(self) -> int | None: ...
    @property
    def interval_end_us(self) -> int | None: ...
    @property
    def conf(self) -> str: ...
    @property
    def params(self) -> str: ...
    @property
    def deadline_us(self) -> int | None: ...
    @property
    def resume(self) -> ResumeClaim | None: ...
    @property
    def callback(self) -> CallbackClaim | None: ...


class PastRun(Protocol):
    """A run, of this DAG or another; `store.people_calls.RunRecord` says what each field means."""

    @property
    def dag_id(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def conf(self) -> str: ...
    @property
    def logical_us(self) -> int | None: ...
    @property
    def interval_start_us(self) -> int | None: ...
    @property
    def interval_end_us(self) -> int | None: ...
    @property
    def created_us(self) -> int: ...
    @property
    def started_us(self) -> int | None: ...
    @property
    def ended_us(self) -> int | None: ...


class TaskServices(Protocol):
    """What an attempt can ask for; each call waits for the answer.

    Raises:
        tidemill.core.errors.TidemillError: The store cannot be reached, or the attempt has been replaced.
    """

    def get_xcom(
        self,
        task_ids: tuple[str, ...],
        key: str,
        map_index: int = -1,
        include_prior: bool = False,
        dag_id: str | None = None,
        run_id: str | None = None,
    ) -> tuple[str | None, ...]:
        """Return what tasks pushed under a key, in order; None: nothing. By default in this run."""
        ...

    def get_earlier_run(self, state: str | None) -> PastRun | None:
        """Return the run of this DAG with the logical date before that of this run, in a state; None: there is none."""
        ...

    def get_run(self, dag_id: str, run_id: str) -> PastRun | None:
        """Return a run; None: there is none."""
        ...

    def push_xcom(self, key: str, value: str) -> None:
        """Store a value of this task."""
        ...

    def get_variable(self, key: str) -> str | None:
        """Return the value of a variable, as it was set; None: it does not exist."""
        ...

    def set_variable(self, key: str, value: str, description: str | None = None) -> None:
        """Set a variable."""
        ...

    def delete_variable(self, key: str) -> bool:
        """Delete a variable; False: it did not exist."""
        ...

    def get_connection(self, conn_id: str) -> str | None:
        """Return a connection, as JSON of the fields of `tidemill.dags.Connection`; None: it does not exist."""
        ...

    def get_task_state(self, key: str) -> str | None:
        """Return what earlier attempts of this task stored; None: nothing."""
        ...

    def set_task_state(self, key: str, value: str) -> None:
        """Store a value that outlives retries."""
        ...

    def delete_task_state(self, key: str) -> None:
        """Delete such a value."""
        ...

    def clear_task_state(self) -> None:
        """Delete all such values of this task."""
        ...
