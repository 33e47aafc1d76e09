"""Payloads of the messages of one window. Messages that one answer of the sink settles are released together.

A delivery batch does the work of one submission per message at a lower cost: as long as nothing happens to one of its
messages, one call releases all of them. The batch as a whole counts nothing; a message that is refused, retried or
dead-lettered is released by itself. A message for which several hooks returned payloads has one part, and one hold, per
hook.

Invariant: a part is released once, when the last of its payloads is settled, and never waits for another part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

#: Called with the message indexes of the released parts, and the total size of their payloads.
Released = Callable[[Sequence[int], int], None]


class BatchPart(msgspec.Struct, eq=False):
    """The payloads that one hook returned for one message; acts as their submission and as their origin.

    Attributes:
        batch: The delivery batch.
        index: The index of the message in its window.
        message: The message.
        pending: The number of payloads that are not settled.
        task: The task whose hook returned the payloads, if there is one.
        size_bytes: The payloads' size, once they are submitted.
    """

    batch: DeliveryBatch
    index: int
    message: Any
    pending: int
    task: Any = None
    size_bytes: int = 0

    @property
    def origin(self) -> Any:
        """The origin of the payloads: the part itself."""
        return self

    @property
    def sources(self) -> Sequence[Any]:
        return (self.message,)

    @property
    def hook(self) -> str:
        """The hook that returned the payloads."""
        return self.batch.hook

    def settle(self, count: int = 1) -> None:
        """Subtract settled payloads; the last one releases the message."""
        self.pending -= count
        if self.pending == 0:
            self.batch.release([self])


class DeliveryBatch:
    """The common data of a delivery batch's parts.

    Args:
        hook: The hook that returned the payloads.
        released: Called when parts are released.
    """

    __slots__ = ("_released", "hook")

    def __init__(self, hook: str, released: Released) -> None:
        self.hook = hook
        self._released = released

    def release(self, parts: Sequence[BatchPart]) -> None:
        """Release parts whose payloads are all settled."""
        try:
            self._released([part.index for part in parts], sum([part.size_bytes for part in parts]))
        except Exception as error:  # a bug; payloads that are settled in the same call must not suffer
            context = {"message": "the release of delivered payloads", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def settle_all(submissions: Iterable[Any]) -> None:
    """Settle one payload of each submission; parts of a delivery batch are released together."""
    together: dict[DeliveryBatch, list[BatchPart]] = {}
    for each in submissions:
        if type(each) is not BatchPart:
            each.settle()
            continue
        each.pending -= 1
        if each.pending == 0:
            if (parts := together.get(each.batch)) is None:
                parts = together[each.batch] = []
            parts.append(each)
    for batch, parts in together.items():
        batch.release(parts)
