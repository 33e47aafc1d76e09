"""The scheduler's loop: one turn of the store, then a wait for new work.

`core.tasks` makes all decisions within the store's transactions. Between turns the loop remembers only the runs and
DAGs that failed, so a scheduler can end at any moment and another one continues.

Invariants:
- The bell remembers a ring during a turn, so no event is missed.
- Without a ring, there is a turn every SCAN_SECONDS, and when work becomes due.
- A failed turn is retried, whatever the error.
- A run or DAG that fails is retried every AGAIN_SECONDS, and costs nothing in between.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.setup import throttle
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.service_calls import MapLimits, SchedulerAnswer, SchedulerTurn
from tidemill.store.database import StoreAwayError, StoreCalls
from tidemill.store.doorbell import StoreBell

log = structlog.get_logger(__name__)

#: The interval of turns, in case a ring was lost.
SCAN_SECONDS = 2.0
#: How long a failed run or DAG is skipped.
AGAIN_SECONDS = 60.0
#: The maximum number of runs or DAGs that a turn skips.
_MAX_SKIPPED = 1000
#: The pause before retrying due work that a turn left undone.
_LATE_SECONDS = 0.25
#: The pause before looking again at work that another transaction had locked.
_SKIPPED_SECONDS = 0.05
#: The longest rest after a turn: one that follows at once would find the little that has become ready during the last
#: one, and a turn costs nearly the same for one task as for ten.
_REST_SECONDS = 0.05
#: The store's clock and this process's timer differ slightly.
_EARLY_SECONDS = 0.001
_LOG_SECONDS = 10.0


class Scheduler:
    """The scheduler of a store.

    Args:
        store: Answers calls.
        bell: Rings when there is work.
        session: The id of its session.
        limits: The limits of mapped tasks.
        missing_file_seconds: How long a queued task waits if no live worker of its queue has its file.
    """

    def __init__(
        self,
        store: StoreCalls,
        bell: StoreBell,
        session: int,
        limits: MapLimits | None = None,
        missing_file_seconds: float = 60.0,
    ) -> None:
        self._limits = limits or MapLimits()
        self._missing_file_us = round(missing_file_seconds * 1e6)
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
            CallRefusedError: Another process has ended this session.
            ConfigError: The tables are no longer those of this program.
        """
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                answer = await self._store.call(self._build_turn())
            except (CallRefusedError, ConfigError):
                raise
            except RemoteError as error:
                if not isinstance(error, StoreAwayError):
                    throttle(log, _LOG_SECONDS).warning(
                        "the scheduler cannot reach the store; retrying", error=str(error)
                    )
                await self._wait_after_failure()
                continue
            except Exception:
                # One failed turn must not stop all runs forever.
                throttle(log, _LOG_SECONDS).error(
                    "a turn of the scheduler failed; retrying; this is a bug in tidemill", exc_info=True
                )
                await self._wait_after_failure()
                continue
            self._failures = 0
            self._note_broken(answer)
            if answer.more:
                # Give other calls a chance between two turns.
                await asyncio.sleep(0)
            else:
                ended = loop.time()
                if not answer.again:
                    await self._bell.wait(Channel.SCHEDULER, compute_wait(answer))
                # A turn that follows a long pause follows at once.
                await asyncio.sleep(max(0.0, min(ended - began, _REST_SECONDS) - (loop.time() - ended)))

    def _build_turn(self) -> SchedulerTurn:
        now = asyncio.get_running_loop().time()
        for skipped in (self._skip_runs, self._skip_dags):
            # The dict is ordered by time, so expired entries come first.
            while skipped and (next(iter(skipped.values())) <= now or len(skipped) > _MAX_SKIPPED):
                del skipped[next(iter(skipped))]
        return SchedulerTurn(
            self._session,
            skip_runs=tuple(self._skip_runs),
            skip_dags=tuple(self._skip_dags),
            map_limits=self._limits,
            missing_file_us=self._missing_file_us,
        )

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
    """Return the scheduler's wait in seconds after a turn, if the bell does not ring.

    Example:
        >>> compute_wait(SchedulerAnswer(next_due_us=1_500_000, now_us=1_000_000))
        0.501
        >>> compute_wait(SchedulerAnswer(next_due_us=1_000_000, now_us=1_500_000))
        0.25
    """
    if answer.skipped:
        return _SKIPPED_SECONDS
    if answer.next_due_us is None:
        return SCAN_SECONDS
    seconds = (answer.next_due_us - answer.now_us) / 1e6
    return _LATE_SECONDS if seconds <= 0 else min(SCAN_SECONDS, seconds + _EARLY_SECONDS)
