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


@answered_by("dags.xcoms:list_xcoms", reads=True)
class ListXComs(Call[Listed[XComRecord]], frozen=True):
    """Return the XComs of a run, by task and key. `task_id`: None for all; `map_index`: None for all instances."""

    dag_id: str
    run_id: str
    task_id: str | None = None
    after: str | None = None
    limit: int = PAGE
    map_index: int | None = None
