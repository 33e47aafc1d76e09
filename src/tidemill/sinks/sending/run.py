"""Payloads of messages of one window; what one answer of the sink settles is released together.

A run is what a submission per message would be, at the cost of few: as long as nothing happens to one of its messages,
all of them are released by one call. Nothing is counted for the run as a whole: a message that is refused, retried or
dead-lettered is released by itself. One for which several hooks returned something has a part, and a hold, for each.

Invariant: a part is released once, when the last of its payloads is settled, and never waits for another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

#: Called with the index of the message of each part that is released, and the size of their payloads.
Released = Callable[[Sequence[int], int], None]


class RunPart(msgspec.Struct, eq=False):
    """What one hook returned for one message: what the submission and the origin of these payloads would be.

    Attributes:
        run: The run.
        index: Of the message in its window.
        message: The message.
        pending: How many of its payloads are not settled.
        task: The task whose hook returned them, if it was one.
        size_bytes: Their size, once they are submitted.
    """

    run: SubmissionRun
    index: int
    message: Any
    pending: int
    task: Any = None
    size_bytes: int = 0

    @property
    def origin(self) -> Any:
        """Where the payloads come from: itself."""
        return self

    @property
    def sources(self) -> Sequence[Any]:
        """The message."""
        return (self.message,)

    @property
    def hook(self) -> str:
        """The hook that returned them."""
        return self.run.hook

    def settle(self, count: int = 1) -> None:
        """Count payloads off; the last one releases the message."""
        self.pending -= count
        if self.pending == 0:
            self.run.release([self])


class SubmissionRun:
    """What the parts of a run have in common.

    Args:
        hook: The hook that returned the payloads.
        released: Called when parts are released.
    """

    __slots__ = ("_released", "hook")

    def __init__(self, hook: str, released: Released) -> None:
        """Keep what to call."""
        self.hook = hook
        self._released = released

    def release(self, parts: Sequence[RunPart]) -> None:
        """Release parts whose payloads are settled."""
        try:
            self._released([part.index for part in parts], sum([part.size_bytes for part in parts]))
        except Exception as error:  # a bug; payloads that are settled with it must not suffer
            context = {"message": "the release of delivered payloads", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def settle_all(submissions: Iterable[Any]) -> None:
    """Settle one payload of each submission; parts of a run are released together."""
    together: dict[SubmissionRun, list[RunPart]] = {}
    for each in submissions:
        if type(each) is not RunPart:
            each.settle()
            continue
        each.pending -= 1
        if each.pending == 0:
            if (parts := together.get(each.run)) is None:
                parts = together[each.run] = []
            parts.append(each)
    for run, parts in together.items():
        run.release(parts)
