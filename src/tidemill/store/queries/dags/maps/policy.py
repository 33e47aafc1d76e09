"""The limits of a map, and whether it may start elements now."""

from __future__ import annotations

from tidemill.core.tasks.expansion import (
    MapPolicy,
)
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.queries.dags.state.task_rows import TaskEntry


def get_policy(head: TaskEntry, limits: MapLimits) -> MapPolicy:
    """Return the limits of a map; `limits`: those that hold unless its task sets them."""
    policy = head.plan.build_map_policy(limits.max_outstanding, limits.max_map_length)
    assert policy is not None
    return policy if head.window is None else policy._replace(max_outstanding=head.window)


def may_start(head: TaskEntry) -> bool:
    """Whether a map may start elements: its run goes on, and the map is not about to end."""
    stop = head.run.stop
    # Teardowns clean up after a fail-fast stop.
    goes_on = stop is None or (stop == "fail_fast" and head.plan.structure.is_teardown)
    return goes_on and head.row.state is not TaskState.ENDING and head.run.state == "running"
