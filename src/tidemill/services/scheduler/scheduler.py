"""The loop of the scheduler: a turn of the store, then a wait until there is something to do again.

All decisions are made by `core.tasks` within the store's transactions; nothing is kept here between two turns but what
could not be worked on, so that a scheduler can end at any moment and another one continues.

Invariants: the bell remembers a ring while the store is looked at, so that nothing that happens meanwhile is missed;
without a ring the store is looked at every SCAN_SECONDS; what is due is looked at when it is; a turn that fails is
tried again, whatever the error; a run or DAG that cannot be worked on is tried again every AGAIN_SECONDS, and costs
nothing in between.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.setup import throttle
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.service_calls import SchedulerAnswer, SchedulerTurn
from tidemill.store.database import StoreCalls
from tidemill.store.doorbell import StoreBell

log = structlog.get_logger(__name__)

#: A look at the store in case a ring was lost.
SCAN_SECONDS = 2.0
#: How long a run or DAG that could not be worked on is passed over.
AGAIN_SECONDS = 60.0
#: The most that one turn passes over.
_MAX_SKIPPED = 1000
#: What is due, but was not done, is looked at again after this time.
_LATE_SECONDS = 0.25
#: The clock of the store and the timer of this process differ a little.
_EARLY_SECONDS = 0.001
_LOG_SECONDS = 10.0


class Scheduler:
    """The scheduler of a store.

    Args:
        store: Answers calls.
        bell: Says when there is something to do.
        session: The number of the service that it is.
    """

    def __init__(self, store: StoreCalls, bell: StoreBell, session: int) -> None:
        """Do nothing yet."""
        self._store = store
        self._bell = bell
        self._session = session
        self._backoff = Backoff(0.1, 5.0)
        self._failures = 0
        self._skip_runs: dict[int, float] = {}
        self._skip_dags: dict[int, float] = {}

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            CallRefusedError: The service has been ended by somebody else.
        """
        while True:
            try:
                answer = await self._store.call(self._build_turn())
            except CallRefusedError:
                raise
            except RemoteError as error:
                throttle(log, _LOG_SECONDS).warning(
                    "the scheduler cannot reach the store; it tries again", error=str(error)
                )
                await self._wait_after_failure()
                continue
            except Exception:
                # Runs are not to stand still for ever because of one turn.
                throttle(log, _LOG_SECONDS).error(
                    "a turn of the scheduler failed; it tries again; this is a bug in tidemill", exc_info=True
                )
                await self._wait_after_failure()
                continue
            self._failures = 0
            self._note_broken(answer)
            if answer.more:
                # The calls of others come between two turns.
                await asyncio.sleep(0)
            else:
                await self._bell.wait(Channel.SCHEDULER, compute_wait(answer))

    def _build_turn(self) -> SchedulerTurn:
        now = asyncio.get_running_loop().time()
        for skipped in (self._skip_runs, self._skip_dags):
            # In the order in which they were noted.
            while skipped and (next(iter(skipped.values())) <= now or len(skipped) > _MAX_SKIPPED):
                del skipped[next(iter(skipped))]
        return SchedulerTurn(self._session, skip_runs=tuple(self._skip_runs), skip_dags=tuple(self._skip_dags))

    def _note_broken(self, answer: SchedulerAnswer) -> None:
        until = asyncio.get_running_loop().time() + AGAIN_SECONDS
        for skipped, broken in ((self._skip_runs, answer.broken_runs), (self._skip_dags, answer.broken_dags)):
            for number in broken:
                skipped.pop(number, None)
                skipped[number] = until

    async def _wait_after_failure(self) -> None:
        self._failures += 1
        await asyncio.sleep(self._backoff.compute_delay(self._failures, random.getrandbits(JITTER_BITS)))


def compute_wait(answer: SchedulerAnswer) -> float:
    """Return how many seconds the scheduler waits after a turn, unless the bell rings.

    Example:
        >>> compute_wait(SchedulerAnswer(next_due_us=1_500_000, now_us=1_000_000))
        0.501
        >>> compute_wait(SchedulerAnswer(next_due_us=1_000_000, now_us=1_500_000))
        0.25
    """
    if answer.next_due_us is None:
        return SCAN_SECONDS
    seconds = (answer.next_due_us - answer.now_us) / 1e6
    return _LATE_SECONDS if seconds <= 0 else min(SCAN_SECONDS, seconds + _EARLY_SECONDS)
