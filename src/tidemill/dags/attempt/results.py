"""The result of an attempt, as workers report it. Values are encoded by `runtime.json.codec`."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.tasks.endings import AttemptEnding


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The ending of an attempt, and its effects.

    Attributes:
        ending: How the attempt ended.
        xcoms: The returned values by key, encoded; values that the task pushed itself are already stored.
        skip: The direct downstream tasks to skip.
        skip_all_downstream: Whether to skip all downstream tasks except teardowns.
        label: The rendered `map_index_template` of an element; None: there is none.
    """

    ending: AttemptEnding
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    label: str | None = None
