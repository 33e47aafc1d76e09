"""One service of a name on a machine: a second one is refused, and the next one takes over from a crashed one at once.

Invariant: a session is taken over before its lease has expired only by the process that holds the lock that its row
names; hosts and containers may share host names, boot ids and process ids, but not that.
"""

from __future__ import annotations

import asyncio

import structlog

from tidemill.runtime.files.lock import WorkerNameInUseError
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.runtime.process.table import is_pid_free
from tidemill.services.sessions.releasing import release_rest
from tidemill.services.zygote.orphans import end_forked
from tidemill.store.calls.service_calls import ListSessions, LoseSession
from tidemill.store.database import StoreCalls
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)


def lock_name(kind: str, name: str, url: str, name_env: str) -> IdentityLock:
    """Return the acquired lock of a service's name on this machine.

    Args:
        kind: The kind of the service.
        name: Its name.
        url: The URL of its database.
        name_env: The variable that gives a service another name.

    Raises:
        WorkerNameInUseError: Another process of this machine holds it.
        ConfigError: The folder for locks cannot be used.
    """
    lock = IdentityLock(kind, f"{name}\0{url}")
    if not lock.acquire():
        raise WorkerNameInUseError(
            f"the {kind} {name!r} of this database runs on this host already, as process {lock.holder}; stop that "
            f"process, or give this one another name: {name_env}=..."
        )
    return lock


async def end_predecessor(store: StoreCalls, kind: str, lock: IdentityLock) -> None:
    """End the session of a crashed process that had the lock before, and what is left of its processes.

    Raises:
        RemoteError: The database rejects the request.
    """
    if not lock.identity:
        return
    for one in await call_patiently(store, ListSessions(kind)):
        if one.lock != lock.identity:
            continue
        if is_pid_free(one.pid):
            await asyncio.to_thread(end_forked, str(one.pid))
        if await call_patiently(store, LoseSession(one.id)):
            log.warning(f"the last {kind} of this name did not end properly; taking over its work", session=one.id)
        # Also if it had ended: the answer to an earlier attempt of the same request may have been lost.
        await release_rest(store)
