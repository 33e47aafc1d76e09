"""How often something failed, from the events that tell of it.

One failure has several events: each try that was repeated, the last try, its dead letter. So events are not added up:
the count is that of the kind that happened most often, tries that were repeated and tasks that were replaced left out.
What was repeated, or replaced, and then succeeded counts as no failure.
"""

from __future__ import annotations

from collections.abc import Mapping

#: A try that failed and was repeated; a task that failed and was replaced by others, which may succeed.
_GOES_ON = frozenset({"task_retry", "task_replaced"})


def count_failures(kinds: Mapping[str, int]) -> int:
    """Return how often something failed for good, given the events with one error by kind.

    Example:
        >>> count_failures({"task_retry": 40, "task_failed": 3, "dead_lettered": 3})
        3
        >>> count_failures({"task_retry": 2, "task_replaced": 1})
        0
    """
    return max((count for kind, count in kinds.items() if kind not in _GOES_ON), default=0)


def rank_failures(error_class: str, kinds: Mapping[str, int]) -> tuple[int, int, str]:
    """Return the key by which errors are listed: those that failed most often first, then those with most events."""
    return (-count_failures(kinds), -sum(kinds.values()), error_class)
