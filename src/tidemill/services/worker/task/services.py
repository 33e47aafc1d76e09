"""An attempt's access to the store, through the worker of its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from tidemill.dags.attempt.task_services import HandledBatch, PageQuery, PartResult, XComQuery
from tidemill.dags.exceptions import TaskError
from tidemill.store.calls.call import Call
from tidemill.store.calls.iteration_calls import GetParts, IterationPage, KeepParts, KeptPart, PartCounts
from tidemill.store.calls.run_calls import GetRun, RunRecord
from tidemill.store.calls.stream_calls import KeepBatch, StreamBatch, StreamWant, TakeEvents
from tidemill.store.calls.task_calls import (
    ClearTaskState,
    DeleteTaskState,
    DeleteVariable,
    EmitItems,
    GetChunkItems,
    GetConnection,
    GetEarlierRun,
    GetTaskState,
    GetValuePage,
    GetVariable,
    GetXCom,
    ItemsStored,
    MapItem,
    PushXCom,
    SetTaskState,
    SetVariable,
    StoreListPart,
    ValuePage,
)
from tidemill.store.calls.worker_calls import ClaimedAttempt

A = TypeVar("A")


class WorkerAsker(Protocol):
    """Calls the store through the worker."""

    def ask(self, call: Call[A]) -> A:
        """Return the store's answer."""
        ...

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        """Give up the attempt's slots of its pool and its worker until it may go on, or `is_over` returns True."""
        ...

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        """Do the same for an attempt that waits for elements."""
        ...


class StoreServices:
    """The store's services for an attempt; a `dags.attempt.task_services.TaskServices`."""

    def __init__(self, attempt: ClaimedAttempt, asker: WorkerAsker) -> None:
        self._attempt = attempt
        self._asker = asker

    def _check_runs(self, what: str) -> None:
        """Check that this is an attempt of the task.

        Raises:
            TaskError: It is a callback, which the store would take for a replaced attempt.
        """
        if self._attempt.callback is not None:
            raise TaskError(f"a callback cannot {what}: its task has ended; do it in the task, or set a Variable")

    def get_xcom(self, query: XComQuery) -> tuple[str | None, ...]:
        return self._asker.ask(GetXCom(self._attempt.run, *query))

    def get_earlier_run(self, state: str | None) -> RunRecord | None:
        """Return the run of this DAG with the previous logical date, in a given state; None: there is none."""
        return self._asker.ask(GetEarlierRun(self._attempt.run, state))

    def get_run(self, dag_id: str, run_id: str) -> RunRecord | None:
        return self._asker.ask(GetRun(dag_id, run_id))

    def get_page(self, query: PageQuery) -> ValuePage:
        return self._asker.ask(GetValuePage(self._attempt.run, *query))

    def emit(self, first: int, values: tuple[str, ...]) -> ItemsStored:
        """Store values that this generator task yielded, from the index `first` on; see `EmitItems`."""
        self._check_runs("yield values")
        return self._asker.ask(EmitItems(self._attempt.task, self._attempt.epoch, first, values))

    def store_list(self, key: str, first: int, values: tuple[str, ...], total: int) -> None:
        """Store a part of a list of this task; see `StoreListPart`."""
        self._check_runs("store a list")
        self._asker.ask(StoreListPart(self._attempt.task, self._attempt.epoch, key, first, values, total))

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        """Wait, holding nothing that elements need, until they have taken enough of what was yielded."""
        self._asker.wait_for_place(is_over)

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        """Wait, holding nothing, until the source of the elements has more of them, or has ended."""
        self._asker.wait_for_elements(is_over)

    def take_events(self, trigger: int, after: int, limit: int, wait_seconds: float) -> StreamBatch:
        """Return the next events of the stream, as soon as there is one, or after a wait; see `TakeEvents`."""
        self._check_runs("handle a stream")
        want = StreamWant(trigger, after, limit)
        return self._asker.ask(TakeEvents((want,), int(wait_seconds * 1e6)))[0]

    def keep_batch(self, batch: HandledBatch) -> None:
        self._check_runs("handle a stream")
        self._asker.ask(
            KeepBatch(
                self._attempt.task,
                self._attempt.epoch,
                batch.trigger,
                batch.handled,
                batch.number,
                batch.emitted,
                batch.writes.xcoms,
                batch.checkpoint,
                stops=batch.stops,
                lists=batch.lists,
                current=batch.current,
                final=batch.final,
                states=batch.writes.states,
                clears_state=batch.writes.clears_state,
            )
        )

    def get_chunk_items(self, after: int, limit: int = 1000, part: int | None = None) -> tuple[MapItem, ...]:
        """Return items of a chunk of this task; see `GetChunkItems`."""
        return self._asker.ask(GetChunkItems(self._attempt.task, after, limit, part))

    def get_parts(self, after: int, limit: int) -> IterationPage:
        """Return the next elements to run in this attempt; see `GetParts`."""
        return self._asker.ask(GetParts(self._attempt.task, after, limit))

    def keep_parts(self, results: Sequence[PartResult], seen: int, running: int) -> PartCounts:
        """Store how elements ended; see `KeepParts`."""
        self._check_runs("run elements")
        rows = tuple(
            KeptPart(one.number, one.state, one.tries, one.value, one.error, one.started_us) for one in results
        )
        return self._asker.ask(KeepParts(self._attempt.task, self._attempt.epoch, rows, seen, running))

    def push_xcom(self, key: str, value: str) -> None:
        """Store a value of this task."""
        self._check_runs("push an XCom")
        self._asker.ask(PushXCom(self._attempt.task, self._attempt.epoch, key, value))

    def get_variable(self, key: str) -> str | None:
        """Return the stored value of a variable; None: it does not exist."""
        return self._asker.ask(GetVariable(key))

    def set_variable(self, key: str, value: str, description: str | None = None) -> None:
        self._asker.ask(SetVariable(key, value, description))

    def delete_variable(self, key: str) -> bool:
        """Delete a variable; return whether it existed."""
        return self._asker.ask(DeleteVariable(key))

    def get_connection(self, conn_id: str) -> str | None:
        """Return a connection, as JSON of the fields of `tidemill.dags.Connection`; None: it does not exist."""
        record = self._asker.ask(GetConnection(conn_id))
        if record is None:
            return None
        names = {"id": "conn_id", "kind": "conn_type"}
        fields = msgspec.structs.asdict(record)
        return msgspec.json.encode({names.get(name, name): value for name, value in fields.items()}).decode()

    def get_task_state(self, key: str) -> str | None:
        """Return a value that earlier attempts of this task stored; None: there is none."""
        self._check_runs("use the task state")
        return self._asker.ask(GetTaskState(self._attempt.task, self._attempt.epoch, key))

    def set_task_state(self, key: str, value: str) -> None:
        """Store a value that outlives retries."""
        self._check_runs("use the task state")
        self._asker.ask(SetTaskState(self._attempt.task, self._attempt.epoch, key, value))

    def delete_task_state(self, key: str) -> None:
        """Delete a stored value of this task."""
        self._check_runs("use the task state")
        self._asker.ask(DeleteTaskState(self._attempt.task, self._attempt.epoch, key))

    def clear_task_state(self) -> None:
        """Delete all stored values of this task."""
        self._check_runs("use the task state")
        self._asker.ask(ClearTaskState(self._attempt.task, self._attempt.epoch))
