"""The loop of the scheduler: a turn of the store, then a wait until there is something to do again.

All decisions are made by `core.tasks` within the store's transactions; nothing is kept here between two turns, so that
a scheduler can end at any moment and another one continues.

Invariants: the bell remembers a ring while the store is looked at, so that nothing that happens meanwhile is missed;
without a ring the store is looked at every SCAN_SECONDS; what is due is looked at when it is.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log import throttle
from tidemill.services.call_store import Bell, CallStore
from tidemill.store.service_calls import SchedulerAnswer, SchedulerTurn

log = structlog.get_logger(__name__)

#: A look at the store in case a ring was lost.
SCAN_SECONDS = 2.0
#: The clock of the store and the timer of this process differ a little.
_EARLY_SECONDS = 0.001
_LOG_SECONDS = 10.0


class Scheduler:
    """The scheduler of a store.

    Args:
        store: Answers calls.
        bell: Says when there is something to do.
        service: The number of the service that it is.
    """

    def __init__(self, store: CallStore, bell: Bell, service: int) -> None:
        """Do nothing yet."""
        self._store = store
        self._bell = bell
        self._service = service
        self._backoff = Backoff(0.1, 5.0)
        self._failures = 0

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            CallRefusedError: The service has been ended by somebody else.
        """
        while True:
            try:
                answer = await self._store.call(SchedulerTurn(self._service))
            except RemoteError as error:
                await self._wait_after(error)
                continue
            self._failures = 0
            if answer.more:
                # The calls of others come between two turns.
                await asyncio.sleep(0)
            else:
                await self._bell.wait(Channel.SCHEDULER, compute_wait(answer))

    async def _wait_after(self, error: RemoteError) -> None:
        self._failures += 1
        throttle(log, _LOG_SECONDS).warning("the scheduler cannot reach the store; it tries again", error=str(error))
        await asyncio.sleep(self._backoff.compute_delay(self._failures, random.getrandbits(JITTER_BITS)))


def compute_wait(answer: SchedulerAnswer) -> float:
    """Return how many seconds the scheduler waits after a turn, unless the bell rings.

    Example:
        >>> compute_wait(SchedulerAnswer(next_due_us=1_500_000, now_us=1_000_000))
        0.501
    """
    if answer.next_due_us is None:
        return SCAN_SECONDS
    seconds = (answer.next_due_us - answer.now_us) / 1e6
    return min(SCAN_SECONDS, max(0.0, seconds) + _EARLY_SECONDS)
