"""The call that counts unfinished tasks, runs and broken files for metrics."""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, answered_by


class StoreCounts(msgspec.Struct, frozen=True):
    """The numbers for metrics: unfinished tasks by state, runs by state, and files that cannot be parsed."""

    tasks: dict[str, int]
    runs: dict[str, int]
    broken_files: int


@answered_by("dags.views.task_lists:count_store", reads=True)
class CountStore(Call[StoreCounts], frozen=True):
    """Return the numbers for metrics."""
