"""The calls of the command line and the web pages about the logs of tries.

Invariant: parts are listed in keyset pages in order; `after` is the `next` of the previous page.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, Listed, answered_by


class LogPartRecord(msgspec.Struct, frozen=True):
    """A part of a log; see `worker_calls.LogPart`."""

    number: int
    first_us: int
    data: bytes
    lines: int
    last: bool


@answered_by("dags.views.task_lists:read_task_log", reads=True)
class ReadLog(Call[Listed[LogPartRecord]], frozen=True):
    """Return the parts of the log of a try, in order. `try_number`: None for the last try.

    All elements of a task with `iterate` have the log of its attempt, and so has the task.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    try_number: int | None = None
    after: str | None = None
    limit: int = 50
