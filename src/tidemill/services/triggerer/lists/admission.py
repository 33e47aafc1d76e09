"""Prevents conflicts between running lists: trigger names, and upstreams that only one list may read.

Invariants: a list is admitted in the transaction that registers its triggers, and admissions are serialized, so only
one of two lists that start at the same time is admitted. The triggers of a list without a live session belong to the
next list that names them. A list is refused only because of a session that was seen alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import structlog
from sqlalchemy import Connection

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.session_watch import SessionLife, SessionWatch
from tidemill.runtime.log.setup import throttle
from tidemill.services.triggerer.hosting.loading import TriggerError, create_trigger
from tidemill.services.triggerer.lists.sessions import KIND, Ownership
from tidemill.store.database import Database
from tidemill.store.queries.triggers.sessions import (
    claim_upstreams,
    end_session,
    find_foreign_names,
    list_live_sessions,
    lock_lists,
    release_upstreams,
)
from tidemill.store.queries.triggers.triggers import cancel_unlisted, make_storable, register_triggers, release_names
from tidemill.store.records import ListHostSession, TriggerSpec
from tidemill.store.write_retry import write_patiently
from tidemill.triggers.base import BaseEventTrigger

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: A message names at most this many triggers.
_NAMED = 5
#: Longer claims are cut and completed with a digest, because claims are keys of an index.
_CLAIM_LENGTH = 300
#: Number of triggers checked before the loop gets its turn.
_BURST = 256


class _ConflictError(Exception):
    """Another list owns a name or an upstream that this list needs; nothing is written.

    Attributes:
        wanted: The conflicting names and upstreams, by the name of the list that owns them.
        sessions: All sessions that have not ended.
    """

    def __init__(self, wanted: dict[str, list[str]], sessions: list[ListHostSession]) -> None:
        super().__init__()
        self.wanted = wanted
        self.sessions = sessions


class ListAdmission:
    """Admits a list to a store that runs other lists.

    Args:
        database: The store.
        ownership: The session in which the list runs.
    """

    def __init__(self, database: Database, ownership: Ownership) -> None:
        self._database = database
        self._ownership = ownership

    async def write(self, specs: Collection[TriggerSpec], work: Callable[[Connection], T]) -> T:
        """Admit the list and run `work` in one transaction; return its result. Waits until the store is reachable.

        Args:
            specs: The new or changed triggers of the list.
            work: Writes in the same transaction; it may be called twice.

        Raises:
            ConfigError: A live list has one of these names, or reads an upstream that only one list may read.
            SessionEndedError: Another process has taken this list over.
        """
        names, claims = [spec.name for spec in specs], await find_upstream_claims(specs)
        pace = self._ownership.pace
        watch = SessionWatch(pace.lease_seconds, pace.look_seconds)

        def admit(connection: Connection) -> T:
            self._ownership.guard(connection)
            self._check(connection, names, claims)
            return work(connection)

        while True:
            began = time.monotonic()
            try:
                return await write_patiently(self._database, admit)
            except _ConflictError as error:
                conflict = error
            # Only a heartbeat that was watched for a while tells whether its session is alive.
            watch.note_beats({session.id: session.beat for session in conflict.sessions}, began)
            if not await self._resolve_conflict(conflict, watch):
                await asyncio.sleep(pace.look_seconds)

    async def reserve(self, new: Sequence[TriggerSpec], replaced: Sequence[TriggerSpec]) -> None:
        """Reserve the names and upstreams of a changed list before any trigger of the old list ends.

        Raises:
            ConfigError: As `write`.
            SessionEndedError: As `write`.
        """
        if not new and not replaced:
            return
        list_name, now_us = self._ownership.list_name, _now_us()
        await self.write([*new, *replaced], lambda c: register_triggers(c, new, list_name, now_us))

    async def forget_unlisted(self, specs: Collection[TriggerSpec]) -> None:
        """Cancel triggers removed from the list while no host ran it, and free their names. Waits for the store.

        Args:
            specs: The whole list.
        """
        list_name, names, now_us = self._ownership.list_name, [spec.name for spec in specs], _now_us()

        def cancel(connection: Connection) -> list[str]:
            self._ownership.guard(connection)
            return cancel_unlisted(connection, list_name, names, now_us)

        def release(connection: Connection) -> None:
            self._ownership.guard(connection)
            release_names(connection, list_name, names)

        gone = await write_patiently(self._database, cancel)
        if gone:
            log.info("triggers were removed from the list while no host ran it; cancelling them", removed=gone)
        # A separate transaction, because both lock triggers, each in the order of their ids.
        await write_patiently(self._database, release)

    async def release(self, old: Collection[TriggerSpec], new: Collection[TriggerSpec]) -> None:
        """Release upstreams that the list no longer reads. Waits for the store.

        Args:
            old: The triggers that have ended here.
            new: The whole list.
        """
        if not (claims := await find_upstream_claims(old)):
            return
        released = set(claims) - set(await find_upstream_claims(new))

        def release(connection: Connection) -> None:
            self._ownership.guard(connection)
            release_upstreams(connection, self._ownership.session_id, released)

        await write_patiently(self._database, release)

    def _check(self, connection: Connection, names: list[str], claims: list[str]) -> None:
        ownership = self._ownership
        lock_lists(connection)
        wanted: dict[str, list[str]] = {}
        for name, other in find_foreign_names(connection, names, ownership.list_name).items():
            wanted.setdefault(other, []).append(f"the trigger {name!r}")
        for claim, other in claim_upstreams(connection, ownership.session_id, claims):
            wanted.setdefault(other, []).append(f"the stream {claim!r}")
        if not wanted:
            return
        sessions = list_live_sessions(connection, KIND)
        wanted = {other: what for other, what in wanted.items() if any(one.list == other for one in sessions)}
        if wanted:
            raise _ConflictError(wanted, sessions)

    async def _resolve_conflict(self, conflict: _ConflictError, watch: SessionWatch) -> bool:
        """Refuse if another list is alive; return True, to retry at once, if all of them are dead."""
        ownership = self._ownership
        rivals = [session for session in conflict.sessions if session.list in conflict.wanted]
        for session in rivals:
            if watch.judge(session.id) is SessionLife.LIVE:
                raise ConfigError(
                    _describe_refusal(ownership.list_name, session, sorted(conflict.wanted[session.list]))
                )
        dead = [session.id for session in rivals if watch.judge(session.id) is SessionLife.DEAD]
        if len(dead) < len(rivals):
            throttle(log, 10.0).info(
                "another list has a trigger or a stream of this one; waiting up to 30 s for its host to respond",
                other=sorted(conflict.wanted),
            )
            return False

        def end(connection: Connection) -> None:
            ownership.guard(connection)
            for number in dead:
                end_session(connection, number, _now_us(), by=ownership.session_id)

        await write_patiently(self._database, end)
        return True


async def find_upstream_claims(specs: Collection[TriggerSpec]) -> list[str]:
    """Return the upstreams that the triggers of a list claim, sorted and without duplicates."""
    found: set[str] = set()
    for count, spec in enumerate(specs):
        if count % _BURST == _BURST - 1:
            await asyncio.sleep(0)
        if not _may_claim(spec.classpath):
            continue
        try:
            claim = create_trigger(spec.name, spec.classpath, spec.kwargs).upstream_claim()  # type: ignore[attr-defined]
            if claim is not None:
                found.add(_shorten_claim(str(claim)))
        except (Exception, SystemExit) as error:
            # The same error will fail its run, and a stream that it cannot name it cannot read.
            if not isinstance(error, TriggerError):
                log.warning("upstream_claim() of a trigger failed", trigger=spec.name, exc_info=error)
    return sorted(found)


def digest_list(specs: Sequence[TriggerSpec]) -> str:
    """Return a digest of a list's content that does not depend on the order of its entries."""
    rows = sorted([spec.name, spec.classpath, spec.kwargs, spec.restart] for spec in specs)
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def _now_us() -> int:
    return time.time_ns() // 1000


def _shorten_claim(claim: str) -> str:
    """Return the claim in a form that any database can store; equal claims stay equal."""
    text = make_storable(claim) or ""
    if len(text) <= _CLAIM_LENGTH:
        return text
    return f"{text[:_CLAIM_LENGTH]} {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _may_claim(classpath: str) -> bool:
    """Return whether a class may claim an upstream; the many that do not are not instantiated to find out."""
    module, _, name = classpath.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit):
        return False
    own = getattr(cls, "upstream_claim", None)
    return own is not None and own is not getattr(BaseEventTrigger, "upstream_claim", None)


def _describe_refusal(list_name: str, session: ListHostSession, what: list[str]) -> str:
    named = ", ".join(what[:_NAMED]) + (f" and {len(what) - _NAMED} more" if len(what) > _NAMED else "")
    return (
        f"the list {list_name} cannot run beside the list {session.list}, which process {session.pid} on "
        f"{session.host} runs: both have {named}; rename or remove the duplicates in one list (and reload it: "
        f"kill -HUP), give its streams a consumer group of their own, or stop process {session.pid}"
    )
