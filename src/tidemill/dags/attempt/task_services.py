"""The interface between an attempt and its worker: the claim, and the requests to the store behind the worker.

Both are protocols, implemented by the worker's process, by `tidemill dags test` and by tests. Values are encoded by
`runtime.json.codec`; times are UTC in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol


class ResumeClaim(Protocol):
    """How a task resumes: the method, its encoded arguments, and the encoded event."""

    @property
    def method(self) -> str: ...
    @property
    def kwargs(self) -> str: ...
    @property
    def payload(self) -> str: ...


class CallbackClaim(Protocol):
    """The callback to run; `store.calls.worker_calls.ClaimedCallback` documents the fields."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...
    @property
    def started_us(self) -> int | None: ...
    @property
    def ended_us(self) -> int: ...
    @property
    def run_state(self) -> str: ...
    @property
    def run_ended_us(self) -> int | None: ...


class AttemptClaim(Protocol):
    """The attempt to run; `store.calls.worker_calls.ClaimedAttempt` documents the fields."""

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
    @property
    def elements(self) -> tuple[str | None, ...]: ...
    @property
    def leaf_indexes(self) -> tuple[int, ...]: ...
    @property
    def map_length(self) -> int | None: ...
    @property
    def stream(self) -> StreamClaim | None: ...
    @property
    def checkpoint(self) -> str | None: ...


class PastRun(Protocol):
    """A run of this DAG or of another; `store.calls.run_calls.RunRecord` documents the fields."""

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


class StoredValues(Protocol):
    """A page of the values of a map or a generator.

    `total` is their number, if it was asked for; `values` are pairs of index and encoded value, sorted by index. The
    last page is empty.
    """

    @property
    def total(self) -> int | None: ...
    @property
    def values(self) -> tuple[tuple[int, str], ...]: ...


class EmitAnswer(Protocol):
    """The answer to values of a generator: how many the store has now, and whether any map wants more."""

    @property
    def total(self) -> int: ...
    @property
    def wanted(self) -> bool: ...
    @property
    def full(self) -> bool: ...


class EarlierClaim(Protocol):
    """A stream of an earlier try; `store.calls.worker_calls.EarlierStream` documents the fields."""

    @property
    def trigger(self) -> int: ...
    @property
    def handled(self) -> int: ...
    @property
    def kept(self) -> int: ...


class StreamClaim(Protocol):
    """The stream of an attempt; `store.calls.worker_calls.ClaimedStream` documents the fields."""

    @property
    def trigger(self) -> int: ...
    @property
    def handled(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def checkpoint(self) -> str | None: ...
    @property
    def due_us(self) -> int | None: ...
    @property
    def carried(self) -> int: ...
    @property
    def earlier(self) -> Sequence[EarlierClaim]: ...


class TakenEvent(Protocol):
    """An event of a stream."""

    @property
    def sequence_index(self) -> int: ...
    @property
    def payload(self) -> str: ...
    @property
    def identity(self) -> str | None: ...


class ChunkItem(Protocol):
    """An item of a chunk; `store.calls.task_calls.MapItem` documents the fields."""

    @property
    def number(self) -> int: ...
    @property
    def leaf_indexes(self) -> tuple[int, ...]: ...
    @property
    def elements(self) -> tuple[str | None, ...]: ...


class IterationPart(Protocol):
    """An element to run in an attempt that runs all; `store.calls.iteration_calls` documents the fields."""

    @property
    def number(self) -> int: ...
    @property
    def tries(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def items(self) -> Sequence[ChunkItem]: ...


class PartPage(Protocol):
    """A page of these elements."""

    @property
    def parts(self) -> Sequence[IterationPart]: ...
    @property
    def next(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def leaves(self) -> bool: ...


class PartResult(Protocol):
    """The end of an element; `value` is encoded."""

    @property
    def number(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def tries(self) -> int: ...
    @property
    def value(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def started_us(self) -> int: ...


class PartOutcome(Protocol):
    """The number of elements that have ended, and the first that failed."""

    @property
    def success(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def first_failed(self) -> int | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def leaves(self) -> bool: ...


class EndingEvent(Protocol):
    """An event that ends the task; `store.calls.trigger_calls.EventEnding` documents the fields."""

    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def xcoms(self) -> tuple[tuple[str, str], ...]: ...


class TakenEvents(Protocol):
    """The next events of a stream; `store.calls.stream_calls.StreamBatch` documents the fields."""

    @property
    def events(self) -> Sequence[TakenEvent]: ...
    @property
    def ended(self) -> bool: ...
    @property
    def left(self) -> int: ...
    @property
    def error(self) -> str | None: ...
    @property
    def ending(self) -> EndingEvent | None: ...


class BatchWrites(NamedTuple):
    """The values that a handler has written for its task with a batch of events, encoded.

    Attributes:
        xcoms: Keys and values of XComs.
        states: Keys and values of the task state; None removes a value.
        clears_state: Whether all other values of the task state are removed.
    """

    xcoms: tuple[tuple[str, str], ...] = ()
    states: tuple[tuple[str, str | None], ...] = ()
    clears_state: bool = False


NO_WRITES: Final = BatchWrites()


class HandledBatch(NamedTuple):
    """Events of a stream that are handled, and what was derived from them; `KeepBatch` documents the fields."""

    trigger: int
    handled: int
    number: int
    emitted: tuple[tuple[str, str | None], ...] = ()
    checkpoint: str | None = None
    stops: bool = False
    lists: bool = False
    current: int | None = None
    final: bool = False
    writes: BatchWrites = NO_WRITES


class XComQuery(NamedTuple):
    """Which XComs to read.

    Attributes:
        task_ids: The tasks.
        key: The key.
        map_index: The element of a mapped task; -1: the task is not mapped.
        include_prior: Whether to search earlier runs, too.
        dag_id: The DAG; None: this one.
        run_id: The run; None: this one, or the latest of another DAG.
    """

    task_ids: tuple[str, ...]
    key: str
    map_index: int = -1
    include_prior: bool = False
    dag_id: str | None = None
    run_id: str | None = None


class PageQuery(NamedTuple):
    """Which values of a mapped task or a generator to read.

    Attributes:
        task_id: The task.
        key: The key.
        after: Return only values with a higher index.
        offset: How many of these to skip.
        limit: The maximum number of values.
        dag_id: The DAG; None: this one.
        run_id: The run; None: this one, or the latest of another DAG, as for `get_xcom`.
        counts: Whether to count all values.
        map_index: The element in which a generator of a mapped group yielded them.
    """

    task_id: str
    key: str
    after: int = -1
    offset: int = 0
    limit: int = 1_000
    dag_id: str | None = None
    run_id: str | None = None
    counts: bool = False
    map_index: int | None = None


class SharedValues(Protocol):
    """Variables and connections, which all DAGs share; each call blocks until the response.

    Raises:
        tidemill.core.errors.TidemillError: The store cannot be reached.
    """

    def get_variable(self, key: str) -> str | None:
        """Return the value of a variable, as it was set; None if it does not exist."""
        ...

    def set_variable(self, key: str, value: str, description: str | None = None) -> None:
        """Set a variable."""
        ...

    def delete_variable(self, key: str) -> bool:
        """Delete a variable; return False if it did not exist."""
        ...

    def get_connection(self, conn_id: str) -> str | None:
        """Return a connection, as JSON of the fields of `tidemill.dags.Connection`; None if it does not exist."""
        ...


class TaskServices(SharedValues, Protocol):
    """The requests that an attempt can make; each call blocks until the response.

    Raises:
        tidemill.core.errors.TidemillError: The store cannot be reached, or another attempt has replaced this one.
    """

    def get_xcom(self, query: XComQuery) -> tuple[str | None, ...]:
        """Return the values that tasks pushed under a key, in order; None where there is none."""
        ...

    def get_earlier_run(self, state: str | None) -> PastRun | None:
        """Return the run of this DAG with the closest earlier logical date, optionally in one state, or None."""
        ...

    def get_run(self, dag_id: str, run_id: str) -> PastRun | None:
        """Return a run; None if it does not exist."""
        ...

    def get_page(self, query: PageQuery) -> StoredValues:
        """Return values that the elements of a map pushed under a key, or that a generator yielded."""
        ...

    def emit(self, first: int, values: tuple[str, ...]) -> EmitAnswer:
        """Store values that this generator task yielded, from the index `first` on; any thread may call this.

        Values that are stored already are passed over.

        Raises:
            TidemillError: A stored value differs, or the store refuses a value.
        """
        ...

    def store_list(self, key: str, first: int, values: tuple[str, ...], total: int) -> None:
        """Store a part of a list of this task, which is too large for an XCom, from the index `first` on.

        Args:
            key: The key of the list.
            first: The index of the first value; parts come in order.
            values: The values.
            total: The length of the list; what was stored beyond it is removed.
        """
        ...

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        """Wait, holding nothing that elements need, until they have taken enough of what this task yielded.

        A thread other than the main one calls this, with `is_over` telling whether the wait is pointless by now.
        """
        ...

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        """Wait, holding no slot of pool or worker, until the source of this attempt's elements has more, or an
        element is to be tried again.

        A thread other than the main one calls this, with `is_over` telling whether the wait is pointless by now.
        """
        ...

    def take_events(self, trigger: int, after: int, limit: int, wait_seconds: float) -> TakenEvents:
        """Return the next events of a stream.

        Args:
            trigger: The trigger.
            after: The number of events that are handled.
            limit: The maximum number of events.
            wait_seconds: How long to wait for an event, or the end, if there is none.
        """
        ...

    def keep_batch(self, batch: HandledBatch) -> None:
        """Store that events are handled, and what was derived from them; see `KeepBatch`."""
        ...

    def get_chunk_items(self, after: int, limit: int = 1_000, part: int | None = None) -> Sequence[ChunkItem]:
        """Return items with numbers above `after` of a chunk; none: there are no more.

        Args:
            after: The number of the last item that is known.
            limit: The maximum number of items.
            part: The chunk, if the task runs all of them in one attempt; None: the element itself.
        """
        ...

    def get_parts(self, after: int, limit: int) -> PartPage:
        """Return the next elements to run in this attempt, with indexes above `after`; see `GetParts`."""
        ...

    def keep_parts(self, results: Sequence[PartResult], seen: int, running: int) -> PartOutcome:
        """Store how elements of this attempt ended; any thread may call this. See `KeepParts`."""
        ...

    def push_xcom(self, key: str, value: str) -> None:
        """Store a value of this task."""
        ...

    def get_task_state(self, key: str) -> str | None:
        """Return the value that an earlier attempt of this task stored; None if there is none."""
        ...

    def set_task_state(self, key: str, value: str) -> None:
        """Store a value that survives retries."""
        ...

    def delete_task_state(self, key: str) -> None:
        """Delete a value stored by `set_task_state`."""
        ...

    def clear_task_state(self) -> None:
        """Delete all values stored by `set_task_state` for this task."""
        ...
