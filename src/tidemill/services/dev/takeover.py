"""Ensures that one `dev` at a time runs the services of a store that several processes can open.

Each `dev` begins its session first, and then looks for others. Sessions of this kind begin one after another, so of two
simultaneous starts the second sees the first, and the one with the lower number stays.

Invariants:
- A live `dev` is never ended; a second one reports where the first runs.
- The work of a dead `dev` is released before any service starts: at once if its process has exited on this machine,
  otherwise when its lease expires without a heartbeat.
- Processes that the dead `dev` had started on this machine have ended before its work is released.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.session_watch import SessionLife, SessionWatch
from tidemill.runtime.process.table import is_pid_free
from tidemill.services.sessions.releasing import release_rest
from tidemill.services.zygote.orphans import end_forked
from tidemill.store.calls.service_calls import BeatSession, ListSessions, LoseOtherSessions, LoseSession, ServiceSession
from tidemill.store.database import Database

log = structlog.get_logger(__name__)

KIND = "dev"


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a `dev` without heartbeats, and the interval of the checks, in seconds."""

    seconds: float = 30.0
    look_seconds: float = 0.5


async def take_over(database: Database, own: int, host: str, boot_id: str, lease: Lease) -> None:
    """Release the work of an earlier `dev` that has died.

    Args:
        database: The store.
        own: The session of this `dev`.
        host: This machine.
        boot_id: The id of its current boot.
        lease: When a `dev` on another machine counts as dead.

    Raises:
        ConfigError: Another `dev` is alive.
        RemoteError: The store failed.
    """
    others = [session for session in await database.call(ListSessions(KIND)) if session.id < own]
    for session in others:
        if session.host == host and session.boot_id == boot_id and is_pid_free(session.pid):
            await asyncio.to_thread(end_forked, str(session.pid))
    if database.exclusive:
        # No other process can have the store open, so all earlier sessions are dead.
        await database.call(LoseOtherSessions(keep=(own,)))
        await release_rest(database)
        return
    doubtful = [one for one in others if one.host != host or (one.boot_id == boot_id and not is_pid_free(one.pid))]
    if doubtful:
        first = doubtful[0]
        log.info(
            "another `tidemill dev` holds this store; waiting to see whether it is still alive",
            pid=first.pid,
            host=first.host,
            seconds=lease.seconds,
        )
        await _watch(database, own, doubtful, lease)
    # With a session end those of the services below it; services that run by themselves stay.
    for session in others:
        # A user may have killed it, and no trigger is blamed for that.
        await database.call(LoseSession(session.id, own, is_death=False))
    if others:
        await release_rest(database)


async def _watch(database: Database, own: int, others: list[ServiceSession], lease: Lease) -> None:
    """Wait until none of these sessions is alive.

    Raises:
        ConfigError: One of them is alive.
    """
    watch = SessionWatch(lease.seconds, lease.look_seconds)
    loop = asyncio.get_running_loop()
    left = {session.id: session for session in others}
    while left:
        now = loop.time()
        live = {session.id: session.beat for session in await database.call(ListSessions(KIND))}
        watch.note_beats({number: beat for number, beat in live.items() if number in left}, now)
        for number, session in list(left.items()):
            life = watch.judge(number)
            if life is SessionLife.LIVE:
                raise ConfigError(
                    f"the store {database.label} is in use by `tidemill dev` as process {session.pid} on "
                    f"{session.host}; stop that process, or set store.url to another store"
                )
            if life is SessionLife.DEAD or number not in live:
                del left[number]
        if left:
            # Another `dev` may be watching this one.
            await database.call(BeatSession(own))
            await asyncio.sleep(lease.look_seconds)
