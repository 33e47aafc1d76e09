"""The named calls about callbacks of runs, for the command line and the web pages."""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by
from tidemill.store.calls.log_calls import LogPartRecord


class CallbackRecord(msgspec.Struct, frozen=True):
    """A callback of a run, or of one of its tasks.

    Attributes:
        id: Its row id.
        task_id: The task; None: it is a callback of the whole run.
        map_index: The map index; -1: the task is not mapped.
        name: `on_success`, `on_failure`, `on_retry` or `on_skipped`.
        state: `due`, `running`, `done` or `failed`.
        error: The exception that it raised.
        created_us: When it became due.
        ended_us: When it ended; None: it has not ended.
    """

    id: int
    task_id: str | None
    map_index: int
    name: str
    state: str
    error: str | None
    created_us: int
    ended_us: int | None


@answered_by("dags.views.callbacks:list_callbacks", reads=True)
class ListCallbacks(Call[Listed[CallbackRecord]], frozen=True):
    """Return the callbacks of the whole run, and the failed callbacks of its tasks."""

    dag_id: str
    run_id: str
    after: str | None = None
    limit: int = PAGE


@answered_by("dags.views.callbacks:read_callback_log", reads=True)
class ReadCallbackLog(Call[Listed[LogPartRecord]], frozen=True):
    """Return the log parts of a callback of the whole run, in order."""

    dag_id: str
    run_id: str
    callback: int
    after: str | None = None
    limit: int = 50
