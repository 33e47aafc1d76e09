"""Ownership of a list of triggers: by this process, or by another one that it waits for.

Theory of operation. Each time this process wants to run its list it begins a session in the store, which it renews with
heartbeats. It takes the list when the owning session is dead (`core.triggers.session_watch`), or when this process
holds the list's lock on the machine and boot where that session held it. A takeover is one transaction: it ends the
other session and takes the list, or does neither. A process whose session was ended learns that with its next
heartbeat, stops its triggers, and waits in a new session like any other. Everything that a session writes about its
list goes through `guard`, which checks in the same transaction that the session has not been ended.

Invariants: a list belongs to one session at a time. An ended session never comes back to life. A process that cannot
reach the store declares no session dead, and opens no upstream once half of its lease has passed. A store that only one
process can write to has no other live session.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import structlog
from sqlalchemy import Connection

from tidemill.core.errors import RemoteError
from tidemill.core.triggers.session_watch import SessionLife, SessionWatch
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.process.boot import read_boot_id
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.runtime.store_clock import read_elapsed_seconds
from tidemill.store.database import Database
from tidemill.store.queries.triggers.sessions import (
    beat_session,
    begin_session,
    count_held_triggers,
    end_session,
    find_lost_triggers,
    list_live_sessions,
    take_list,
)
from tidemill.store.records import ListHostSession
from tidemill.store.write_retry import write_patiently

log = structlog.get_logger(__name__)

KIND = "triggerer"
#: At shutdown: how long writing the end of the session may take, in seconds.
END_SECONDS = 5.0


class SessionEndedError(Exception):
    """Another process has ended this session, and may run its triggers now."""


@dataclass(frozen=True, slots=True)
class SessionPace:
    """How fast dead sessions are noticed.

    Attributes:
        lease_seconds: How long a heartbeat may be missing before its session counts as dead.
        beat_seconds: The interval of a session's heartbeats.
        look_seconds: The interval at which waiting processes check the heartbeats.
    """

    lease_seconds: float = 30.0
    beat_seconds: float = 5.0
    look_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The result of a look at the store.

    Attributes:
        holder: The session that owns the list; None: this one owns it now.
        sessions: All sessions that have not ended, by id.
    """

    holder: int | None
    sessions: dict[int, ListHostSession]


class Ownership:
    """The right of this process to run one list.

    Args:
        database: The store, open for writing.
        list_name: The name of the list.
        name: The name of this process, the same after each start.
        lock: The list's lock on this machine, which need not be held; None: there is none.
        pace: How fast dead sessions are noticed.
        clock: A monotonic clock, in seconds, that also counts while the machine is suspended, as leases do.

    Attributes:
        list_name: The name of the list.
        holder: The session that owns the list while this process waits for it.
    """

    def __init__(
        self,
        database: Database,
        list_name: str,
        *,
        name: str = "",
        lock: IdentityLock | None = None,
        pace: SessionPace | None = None,
        clock: Callable[[], float] = read_elapsed_seconds,
    ) -> None:
        self.list_name = list_name
        self.holder: ListHostSession | None = None
        self.pace = pace or SessionPace()
        self._database = database
        self._name = name or socket.gethostname()
        self._lock = lock
        self._clock = clock
        self._digest = ""
        self._session: int | None = None
        self._lost = asyncio.Event()
        self._doubted = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._held: Callable[[], Mapping[int, int]] = dict
        self._on_taken: Callable[[Mapping[int, int]], None] = lambda taken: None
        self._logged_holder: tuple[int, str, str] | None = None
        # The start of the last transaction that found this session alive.
        self._confirmed_at = -math.inf
        self._confirmation = asyncio.Event()

    @property
    def session_id(self) -> int:
        """The session in which the list runs."""
        assert self._session is not None, "the list is not owned"
        return self._session

    # -- taking the list ----------------------------------------------------------------------------------------

    async def acquire(self, digest: str = "") -> None:
        """Wait until this process owns the list, however long that takes.

        Args:
            digest: A digest of the list's content, to log differences between hosts.
        """
        self._digest = digest
        watch = SessionWatch(self.pace.lease_seconds, self.pace.look_seconds)
        await self._renew()
        while True:
            began = self._clock()
            try:
                sight = await self._database.write(self._look)
            except SessionEndedError:
                await self._begin()
                continue
            except RemoteError as error:
                if not error.retryable:
                    raise
                watch.note_failure()
                throttle(log, 10.0).warning(
                    "cannot read from the store which host runs this list; retrying", error=str(error)
                )
                await asyncio.sleep(self.pace.look_seconds)
                continue
            if sight.holder is None or await self._take_over(sight, watch, began):
                break
            await asyncio.sleep(self.pace.look_seconds)
        self.holder = None
        self._note_confirmed(began)
        log.info("this host runs the list", list=self.list_name, session=self._session)
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="beat of the session")
        self._beating.add_done_callback(self._note_silence)

    async def _take_over(self, sight: Sight, watch: SessionWatch, began: float) -> bool:
        """Try to take the list from a dead session; return whether that worked."""
        watch.note_beats({number: session.beat for number, session in sight.sessions.items()}, began)
        holder = sight.sessions.get(sight.holder or 0)
        if holder is None:
            return False  # its session began after the look, or has ended; the next look finds out
        self.holder = holder
        self._tell(holder)
        # The new session records the lock, so that later hosts on this machine notice its death at once.
        if self._lock is not None and not self._lock.held and self._lock.acquire():
            await self._renew()
        # This process holds the lock that the holder had, so the holder's process has exited.
        locked = self._lock is not None and self._lock.identity == holder.lock != ""
        others = [one.id for one in sight.sessions.values() if one.list == self.list_name]
        dead = [
            number for number in others if watch.judge(number) is SessionLife.DEAD or (locked and number == holder.id)
        ]
        if not dead:
            return False
        try:
            won = await self._database.write(lambda connection: self._take_from(connection, dead))
        except (SessionEndedError, RemoteError):
            return False  # the next look finds out
        if won:
            log.warning(
                "the host that ran this list is dead; this one takes over",
                **describe_session(holder),
                noticed_by="its lock" if locked else "its heartbeat",
            )
        return won

    def _look(self, connection: Connection) -> Sight:
        self.guard(connection)
        sessions = {session.id: session for session in list_live_sessions(connection, KIND)}
        if self._database.exclusive:
            # No other process can write here, so sessions that have not ended belong to killed processes.
            for number in sessions.keys() - {self._session}:
                end_session(connection, number, _now_us(), by=self._session)
        return Sight(take_list(connection, self.list_name, self.session_id), sessions)

    def _take_from(self, connection: Connection, dead: list[int]) -> bool:
        self.guard(connection)
        for number in dead:  # including processes that waited for this list: nothing else would ever end their sessions
            end_session(connection, number, _now_us(), by=self._session)
        return take_list(connection, self.list_name, self.session_id) is None

    async def _begin(self) -> None:
        lock = self._lock.identity if self._lock is not None else ""

        def begin(connection: Connection) -> int:
            return begin_session(
                connection,
                kind=KIND,
                name=self._name,
                host=socket.gethostname(),
                boot_id=read_boot_id(),
                pid=os.getpid(),
                list=self.list_name,
                lock=lock,
                digest=self._digest,
                now_us=_now_us(),
            )

        self._lost.clear()
        self._session = await write_patiently(self._database, begin)

    async def _renew(self) -> None:
        """Continue in a new session, which records whether this process holds the lock."""
        with contextlib.suppress(RemoteError):  # then the lease of the old session expires
            await self._end()
        await self._begin()

    def _tell(self, holder: ListHostSession) -> None:
        before, self._logged_holder = self._logged_holder, (holder.id, holder.digest, self._digest)
        if before == self._logged_holder:
            return
        if before is None or before[0] != holder.id:
            log.info("another host runs this list; this one waits to take over", **describe_session(holder))
        if holder.digest != self._digest:
            log.warning(
                "the active host of this list runs other triggers than the file of this host names; hosts with one "
                "list name are replicas: give them the same file",
                **describe_session(holder),
            )

    # -- running the list ------------------------------------------------------------------------------------------

    def guard(self, connection: Connection) -> None:
        """Check that this session has not been ended, and cannot be ended before the transaction ends.

        Raises:
            SessionEndedError: It has been ended.
        """
        if self._session is None or not beat_session(connection, self._session, _now_us(), self._digest):
            raise SessionEndedError

    def compare_tokens(
        self, held: Callable[[], Mapping[int, int]], on_taken: Callable[[Mapping[int, int]], None]
    ) -> None:
        """With every heartbeat, compare the triggers that this process holds with those in the store.

        Args:
            held: Returns the tokens of the triggers that were claimed in this session, by their ids.
            on_taken: Called with the triggers that another session has claimed, and the tokens they had here.
        """
        self._held, self._on_taken = held, on_taken

    def relist(self, digest: str) -> None:
        """Publish a new digest of the list with the next heartbeat."""
        self._digest = digest

    def check(self) -> None:
        """Send a heartbeat now, because this session may have been ended."""
        self._doubted.set()

    async def wait_lost(self) -> None:
        """Wait until another process has ended this session."""
        await self._lost.wait()

    async def wait_confirmed(self) -> None:
        """Wait until the store has confirmed, less than half a lease ago, that this session is alive.

        Other processes may consider a session without heartbeats dead, and run its list already. Opening an upstream
        then could take it away from them.
        """
        while not self._database.exclusive and self._clock() - self._confirmed_at > self.pace.lease_seconds / 2:
            self._confirmation.clear()
            await self._confirmation.wait()

    def _note_confirmed(self, began: float) -> None:
        self._confirmed_at = began
        self._confirmation.set()

    async def _beat(self) -> None:
        pause = self.pace.beat_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._doubted.wait()
            self._doubted.clear()
            pause = self.pace.beat_seconds
            # Read both before the write: later claims belong to the next beat, and the lease counts from here.
            held, began = dict(self._held()), self._clock()
            try:
                if taken := await self._database.write(partial(self._compare, held)):
                    self._on_taken({number: held[number] for number in taken})
                self._note_confirmed(began)
            except SessionEndedError:
                log.warning(
                    "another host has taken over this list; handing over the triggers that run here",
                    list=self.list_name,
                )
                self._confirmed_at = -math.inf
                self._lost.set()
                return
            except RemoteError as error:
                throttle(log, 10.0).warning("cannot store the heartbeat of this session; retrying", error=str(error))
                pause = min(pause, self.pace.look_seconds)
            except Exception:
                log.exception("the heartbeat of the session failed; this is a bug in tidemill")

    def _note_silence(self, beating: asyncio.Task[None]) -> None:
        """Stop running in a session without heartbeats, because other processes are about to declare it dead."""
        if self._beating is beating and not self._lost.is_set():
            log.error("the heartbeat of the session has ended; this is a bug in tidemill", list=self.list_name)
            self._lost.set()

    def _compare(self, held: Mapping[int, int], connection: Connection) -> list[int]:
        self.guard(connection)
        if count_held_triggers(connection, self.session_id) == (len(held), sum(held.values())):
            return []
        return find_lost_triggers(connection, self.session_id, held)

    # -- releasing the list --------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """End the session, so that another host can take the list at once; does nothing without a session."""
        await self.pause()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end()
        except (TimeoutError, RemoteError):
            log.warning(
                "cannot record in the store that this host has stopped; other hosts notice when its lease expires"
            )

    async def pause(self) -> None:
        """Stop the heartbeats."""
        self._confirmed_at = -math.inf
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait([beating])
        self.compare_tokens(dict, lambda taken: None)

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._database.write(lambda connection: end_session(connection, session, _now_us()))


def describe_session(session: ListHostSession) -> dict[str, object]:
    """Return a description of a session, for logs and reports."""
    return {
        "list": session.list,
        "host": session.host,
        "process": session.pid,
        "since": datetime.fromtimestamp(session.started_us / 1e6, UTC).isoformat(timespec="seconds"),
        "session": session.id,
    }


def _now_us() -> int:
    return time.time_ns() // 1000
