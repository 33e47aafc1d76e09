"""Counts failures, given the events that report them.

One failure has several events: each repeated try, the last try, its dead letter. So events are not added up: the count
is that of the most frequent kind of event, without repeated tries and replaced tasks. A failure that was followed by a
successful repetition or replacement does not count.
"""

from __future__ import annotations

from collections.abc import Mapping

#: A try that failed and was repeated; a task that failed and was replaced by others, which may succeed.
_GOES_ON = frozenset({"task_retry", "task_replaced"})


def count_failures(kinds: Mapping[str, int]) -> int:
    """Return the number of final failures, given the number of events of each kind with one error.

    Example:
        >>> count_failures({"task_retry": 40, "task_failed": 3, "dead_lettered": 3})
        3
        >>> count_failures({"task_retry": 2, "task_replaced": 1})
        0
    """
    return max((count for kind, count in kinds.items() if kind not in _GOES_ON), default=0)


def rank_failures(error_class: str, kinds: Mapping[str, int]) -> tuple[int, int, str]:
    """Return the sort key of an error: most failures first, then most events."""
    return (-count_failures(kinds), -sum(kinds.values()), error_class)
