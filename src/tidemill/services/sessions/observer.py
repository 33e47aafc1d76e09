"""Ends the sessions of dead services, so that others take over their work; every scheduler does this.

`core.triggers.session_watch` decides which sessions are dead, by this process's clock alone. Invariants: time in which
this process could not read the store counts for no session. A session with a parent is left to its parent, which
watches the process itself. A session is ended once: `LoseSession` changes nothing if it has ended or beaten since. A
take-over that an outage may have interrupted is continued by the first look after it.
"""

from __future__ import annotations

import asyncio
import math

import structlog

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.triggers.session_watch import SessionLife, SessionWatch
from tidemill.runtime.log.setup import throttle
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.releasing import release_while_reachable
from tidemill.store.calls.service_calls import ListSessions, LoseSession, ServiceSession
from tidemill.store.database import StoreAwayError, StoreCalls

log = structlog.get_logger(__name__)


class SessionObserver:
    """Observes the sessions of a store.

    Args:
        store: The store.
        own: The session of this process, which is not observed.
        lease: When a session counts as dead.
    """

    def __init__(self, store: StoreCalls, own: int, lease: ServiceLease) -> None:
        self._store, self._own = store, own
        self._look_seconds = lease.beat_seconds
        self._watch = SessionWatch(lease.seconds, lease.beat_seconds)
        self._sweep_seconds = lease.seconds
        self._swept = -math.inf

    async def run(self) -> None:
        """Observe until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.look(began)
            except ConfigError:
                raise  # the tables are no longer those of this program
            except RemoteError as error:
                self.note_outage()
                if not isinstance(error, StoreAwayError):
                    throttle(log, 60.0).warning("cannot observe the sessions of services; retrying", error=str(error))
            except Exception:
                self.note_outage()
                log.exception("observing the sessions of services failed; this is a bug in tidemill")
            await asyncio.sleep(max(0.0, began + self._look_seconds - loop.time()))

    async def look(self, now: float) -> None:
        """Read all sessions, end those that are dead, and from time to time release what ended ones still hold.

        Args:
            now: The time, in seconds of a monotonic clock.

        Raises:
            RemoteError: The store cannot be reached.
        """
        found = {one.id: one for one in await self._store.call(ListSessions()) if self._observes(one)}
        self._watch.note_beats({number: one.beat for number, one in found.items()}, now)
        for number, one in found.items():
            if self._watch.judge(number) is SessionLife.DEAD:
                await self._lose(one)
        if now - self._swept >= self._sweep_seconds:
            self._swept = now
            if left := await self._release():
                log.warning("released what sessions had still held that have ended", count=left)

    def note_outage(self) -> None:
        """Record that the store could not be reached: the time since the last read counts for no session."""
        self._watch.note_failure()
        # The outage may have interrupted a take-over, or hidden the answer of one.
        self._swept = -math.inf

    def _observes(self, one: ServiceSession) -> bool:
        return not one.list and one.parent is None and one.id != self._own

    async def _lose(self, one: ServiceSession) -> None:
        try:
            ended = await self._store.call(LoseSession(one.id, self._own, one.beat))
        except Exception as error:
            if isinstance(error, RemoteError) and error.retryable:
                raise
            # A session that cannot be ended must not keep the others.
            throttle(log, 60.0, about=one.id).error(
                f"cannot end the session of a dead {one.kind}; retrying", session=one.id, exc_info=True
            )
            return
        if ended:
            log.warning(
                f"a {one.kind} is dead: it has sent no heartbeat for too long; others continue its work",
                session=one.id,
                name=one.name,
                host=one.host,
                pid=one.pid,
            )
            await self._release()

    async def _release(self) -> int:
        """Release what ended sessions still hold; return how much that was.

        Raises:
            RemoteError: The store cannot be reached.
        """
        try:
            return await release_while_reachable(self._store)
        except Exception as error:
            if isinstance(error, RemoteError) and error.retryable:
                raise
            # It is not an outage: if it counted as one at each look, no session would ever be dead.
            throttle(log, 60.0).error("cannot release what ended sessions still hold; retrying", exc_info=True)
            return 0
