"""The calls of the command line and the web pages about the elements of a mapped task.

Invariant: elements are listed in keyset pages in the order of their indexes; `after` is the `next` of the previous
page.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, Listed, answered_by
from tidemill.store.calls.instance_calls import TaskRecord


@answered_by("dags.views.task_lists:list_elements", reads=True)
class ListElements(Call[Listed[TaskRecord]], frozen=True):
    """Return the elements of a mapped task by index.

    If few elements are in the states, a page may be empty although others follow.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_id: The mapped task.
        states: Only elements in these states; empty: in all.
        first: The lowest index; None: from the beginning.
        last: The highest index; None: to the end.
        after: The `next` of the previous page.
        limit: The maximum number of elements.
    """

    dag_id: str
    run_id: str
    task_id: str
    states: tuple[str, ...] = ()
    first: int | None = None
    last: int | None = None
    after: str | None = None
    limit: int = 1000


class ElementFailureCount(msgspec.Struct, frozen=True):
    """Elements of a mapped task that failed with the same error.

    Attributes:
        error: The last line of the error.
        elements: How many elements failed with it.
        first: The lowest index of these elements.
    """

    error: str
    elements: int
    first: int


class ElementFailures(msgspec.Struct, frozen=True):
    """The failures of a mapped task by error, the most frequent first.

    Attributes:
        groups: The groups.
        elements: The number of failed elements in these groups.
        more: Whether further elements failed, which are in no group.
    """

    groups: tuple[ElementFailureCount, ...]
    elements: int
    more: bool


@answered_by("dags.views.map_errors:group_failures", reads=True)
class GroupElementFailures(Call[ElementFailures], frozen=True):
    """Group the failed elements of a mapped task by error. `limit`: the number of elements to read, in order."""

    dag_id: str
    run_id: str
    task_id: str
    limit: int = 1000
