"""Decides which elements of a map run again after its source was cleared and has given items again.

An attempt of an element notes the digest of the items with which it starts. An element whose items have another digest
now runs again, whatever its state is; one that has not started yet gets its items when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from tidemill.core.tasks.task_row import TaskRow, TaskState


def compute_digest(items: Sequence[str | None], indexes: Sequence[int]) -> int:
    """Return the digest of the items of an element, a positive number of 63 bits.

    Args:
        items: The encoded items, by leaf; None: it is in the DAG's file, or a fill value.
        indexes: The indexes of the items, which tell apart those that are in the file.

    Example:
        >>> compute_digest(["1", None], [4, 7]) == compute_digest(["1", None], [5, 7])
        True
    """
    digest = blake2b(digest_size=8)
    for item, index in zip(items, indexes, strict=True):
        encoded = b"" if item is None else item.encode("utf-8", "surrogatepass")
        digest.update(f"#{index};".encode() if item is None else f"{len(encoded)};".encode() + encoded)
    return int.from_bytes(digest.digest()) >> 1


def has_to_run_again(task: TaskRow, ran_with: int | None, digest: int, *, changed: bool) -> bool:
    """Return whether an element has to run again with the items that it has now.

    Args:
        task: The element.
        ran_with: The digest of the items with which its last attempt started; None: none is known.
        digest: The digest of its items now.
        changed: Whether one of its items has changed since the element ended.
    """
    decided = task.state if task.ending is None else task.ending.state
    if decided is TaskState.REMOVED:
        return True
    if decided is TaskState.NONE or (task.outcome is None and not task.started):
        return False  # its next attempt gets them
    return changed if ran_with is None else ran_with != digest
