"""The calls that attempts make through their worker: XComs, state, variables, connections, logs.

Invariants: an attempt gives its epoch with everything that it writes, and is refused (FENCED) once its task has moved
on; all of them may be repeated. Values are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call
from tidemill.store.calls.people_calls import RunRecord
from tidemill.store.calls.worker_calls import LogPart

#: What an XCom may hold, in bytes of its encoded value.
MAX_XCOM_BYTES = 1024 * 1024


class GetXCom(Call[tuple[str | None, ...]], frozen=True):
    """Answer the XComs of tasks, in their order; None: there is none.

    Attributes:
        run: The run in whose DAG, and in which, to look.
        task_ids: The tasks, by name.
        key: The key.
        map_index: -1: tasks that are not mapped.
        include_prior: Whether a task without such an XCom in this run gives that of its latest earlier run.
        dag_id: Another DAG to look in; its latest run up to the logical date of `run`, unless `run_id` says which.
        run_id: Another run to look in.
    """

    run: int
    task_ids: tuple[str, ...]
    key: str = "return_value"
    map_index: int = -1
    include_prior: bool = False
    dag_id: str | None = None
    run_id: str | None = None


class GetEarlierRun(Call[RunRecord | None], frozen=True):
    """Answer the run of the same DAG with the latest logical date before that of a run; None: there is none.

    Attributes:
        run: The run; if it has no logical date, no run is before it.
        state: Only runs in this state; None: in any.
    """

    run: int
    state: str | None = None


class PushXCom(Call[None], frozen=True):
    """Store an XCom of an attempt at once; at most MAX_XCOM_BYTES."""

    task: int
    epoch: int
    key: str
    value: str


class GetVariable(Call[str | None], frozen=True):
    """Answer the value of a variable; None: there is none."""

    key: str


class SetVariable(Call[None], frozen=True):
    """Store a variable. `description`: None, as it was."""

    key: str
    value: str
    description: str | None = None


class DeleteVariable(Call[bool], frozen=True):
    """Delete a variable; False: there was none."""

    key: str


class ConnectionRecord(msgspec.Struct, frozen=True):
    """A connection. `extra`: JSON text."""

    id: str
    kind: str
    host: str | None = None
    schema: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    extra: str | None = None
    description: str | None = None


class GetConnection(Call[ConnectionRecord | None], frozen=True):
    """Answer a connection, with its secrets; None: there is none."""

    id: str


class GetTaskState(Call[str | None], frozen=True):
    """Answer a value that a task has kept over its tries; None: there is none."""

    task: int
    epoch: int
    key: str


class SetTaskState(Call[None], frozen=True):
    """Keep a value over the tries of a task."""

    task: int
    epoch: int
    key: str
    value: str


class DeleteTaskState(Call[bool], frozen=True):
    """Delete a value that a task has kept; False: there was none."""

    task: int
    epoch: int
    key: str


class ClearTaskState(Call[int], frozen=True):
    """Delete all values that a task has kept, and answer how many."""

    task: int
    epoch: int


class AppendLog(Call[None], frozen=True):
    """Store parts of logs; one that is stored already stays as it is."""

    parts: tuple[LogPart, ...]
