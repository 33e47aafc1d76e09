"""Who may run the services of a store that many processes can open: one `dev` at a time.

Each `dev` begins its session first, and then looks for others. Of two that begin at the same time the one with the
lower number stays: sessions of this kind begin one after another, so the second one sees the first.

Invariants: a `dev` that lives is never ended, and the one that comes second is told where it runs; what a dead one held
is free before anything is started: at once if its process is gone from this machine, otherwise once its beat has stood
still for a lease; what it had started on this machine has ended before that.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.session_watch import SessionLife, SessionWatch
from tidemill.services.zygote.orphans import end_forked
from tidemill.store.calls.service_calls import BeatSession, ListSessions, LoseOtherSessions, ServiceSession
from tidemill.store.database import Database

log = structlog.get_logger(__name__)

KIND = "dev"


@dataclass(frozen=True, slots=True)
class Lease:
    """How long the beat of a dead `dev` has to stand still, and how often one looks, in seconds."""

    seconds: float = 30.0
    look_seconds: float = 0.5


async def take_over(database: Database, own: int, host: str, boot_id: str, lease: Lease) -> None:
    """End the services of an earlier `dev` that has died.

    Args:
        database: The store.
        own: The session of this `dev`.
        host: This machine.
        boot_id: Its boot.
        lease: When another machine's `dev` counts as dead.

    Raises:
        ConfigError: It lives.
        RemoteError: The store failed.
    """
    others = [session for session in await database.call(ListSessions(KIND)) if session.id < own]
    for session in others:
        if session.host == host and session.boot_id == boot_id and _is_free(session.pid):
            await asyncio.to_thread(end_forked, str(session.pid))
    if database.exclusive:
        # No other process can have the store open: all services of earlier ones are dead.
        await database.call(LoseOtherSessions(keep=(own,)))
        return
    dead = {host}
    doubtful = [one for one in others if one.host != host or (one.boot_id == boot_id and not _is_free(one.pid))]
    if doubtful:
        first = doubtful[0]
        log.info(
            "another `tidemill dev` has this store; waiting to see whether it still runs",
            pid=first.pid,
            host=first.host,
            seconds=lease.seconds,
        )
        await _watch(database, own, doubtful, lease)
        dead |= {session.host for session in doubtful}
    for name in sorted(dead):
        await database.call(LoseOtherSessions(keep=(own,), host=name))


def _is_free(pid: int) -> bool:
    """Return whether no other process of this machine has a number."""
    # In a container that was started again, this process may well have the number of the one before it.
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()


async def _watch(database: Database, own: int, others: list[ServiceSession], lease: Lease) -> None:
    """Return once none of these services lives.

    Raises:
        ConfigError: One of them does.
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
                    f"{session.host}; stop that process, or give this one a store of its own (store.url)"
                )
            if life is SessionLife.DEAD or number not in live:
                del left[number]
        if left:
            # Others may be watching this one.
            await database.call(BeatSession(own))
            await asyncio.sleep(lease.look_seconds)
