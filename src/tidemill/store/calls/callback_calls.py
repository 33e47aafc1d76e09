"""The named calls about callbacks of runs, for people."""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed
from tidemill.store.calls.people_calls import LogPartRecord


class CallbackRecord(msgspec.Struct, frozen=True):
    """A callback of a run, or of one of its tasks.

    Attributes:
        id: Its number.
        task_id: The task; None: it is one of the run as a whole.
        map_index: -1: the task is not mapped.
        name: `on_success`, `on_failure`, `on_retry` or `on_skipped`.
        state: `due`, `running`, `done` or `failed`.
        error: What it raised.
        created_us: When it was due.
        ended_us: When it ended; None: it has not.
    """

    id: int
    task_id: str | None
    map_index: int
    name: str
    state: str
    error: str | None
    created_us: int
    ended_us: int | None


class ListCallbacks(Call[Listed[CallbackRecord]], frozen=True):
    """Answer the callbacks of a run: those of the run as a whole, and those of tasks that have failed."""

    dag_id: str
    run_id: str
    after: str | None = None
    limit: int = PAGE


class ReadCallbackLog(Call[Listed[LogPartRecord]], frozen=True):
    """Answer the parts of the log of a callback of a run as a whole, in order."""

    dag_id: str
    run_id: str
    callback: int
    after: str | None = None
    limit: int = 50
