"""The calls of the command line and the web pages about the XComs of a run.

Invariant: XComs are listed in keyset pages in a stable order; `after` is the `next` of the previous page.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by


class XComRecord(msgspec.Struct, frozen=True):
    task_id: str
    map_index: int
    key: str
    value: str
    created_us: int


@answered_by("dags.values.xcoms:list_xcoms", reads=True)
class ListXComs(Call[Listed[XComRecord]], frozen=True):
    """Return the XComs of a run, by task and key.

    Named by its id, a task with `iterate` has the results of its elements before its other XComs.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_id: The task; None: all tasks.
        after: The `next` of the previous page.
        limit: The maximum number of XComs.
        map_index: The index of the instances, or the lowest one; None: all instances.
        last_index: The highest index; None: `map_index`.
    """

    dag_id: str
    run_id: str
    task_id: str | None = None
    after: str | None = None
    limit: int = PAGE
    map_index: int | None = None
    last_index: int | None = None
