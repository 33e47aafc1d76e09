"""A store of deferred tasks in memory, for tests of what a triggerer does when its store fails or ends its service."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.core.errors import RemoteError
from tidemill.runtime.json.codec import decode
from tidemill.runtime.log.task_lines import TaskLine, decode_lines
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import BeatSession, BeginSession, EndSession, ReleaseLeft, StopSession
from tidemill.store.calls.task_calls import AppendLog, GetVariable
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    CountUndelivered,
    EventOutcome,
    EventOutcomeKind,
    FailTrigger,
    HeldTriggers,
    KillCalled,
    ListLoads,
    PlaceTriggers,
    ReleaseTriggers,
    StartClaim,
    StoppedTrigger,
    StoreEvents,
    TriggererLoadRecord,
)
from tidemill.store.calls.worker_calls import LogPart, OutcomeKind


@dataclass
class Deferred:
    """The trigger of a deferred task."""

    claim: ClaimedTrigger
    session: int | None = None
    token: int = 0
    stop: str | None = None
    payload: Any = None
    ending: str | None = None
    error: str | None = None
    claims: int = 0

    @property
    def resumed(self) -> bool:
        return self.stop == "done"


@dataclass
class TaskStore:
    """Answers the calls of triggerers; a `Calls` and a `Bell`.

    Attributes:
        deferred: The triggers, by id.
        live: The services that have not ended.
        ended: Those that have ended cleanly.
        fail: Called with each request; what it returns is raised, "before" or "after" the call was carried out.
        parts: The parts of logs, by task.
        requests: All requests.
        variables: The variables.
        elsewhere: The triggers whose streams another service reads.
        undelivered: The number of undelivered events of each stream.
        loads: How much other triggerers run.
        kill_claims: Stopped triggers that the next claim returns, to have their `on_kill` called.
        holds: Whether nothing can be claimed any more.
        kills: The calls of `on_kill` of stopped triggers that were reported, with their errors.
    """

    deferred: dict[int, Deferred] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)
    fail: Callable[[Any], str | None] = lambda request: None
    parts: dict[int, dict[int, LogPart]] = field(default_factory=lambda: defaultdict(dict))
    requests: list[Any] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)
    undelivered: int = 0
    loads: list[TriggererLoadRecord] = field(default_factory=list)
    kills: list[tuple[int, str | None]] = field(default_factory=list)
    kill_claims: list[ClaimedTrigger] = field(default_factory=list)
    holds: bool = False
    _answers: dict[tuple[type, int], tuple[int, Any]] = field(default_factory=dict)
    _services: int = 0
    _rung: asyncio.Event = field(default_factory=asyncio.Event)

    def defer(self, cls: type | str, key: str | None = None, **kwargs: Any) -> Deferred:
        """Defer a task to a trigger."""
        number = len(self.deferred) + 1
        classpath = cls if isinstance(cls, str) else f"tests.services.triggerer.hosted.{cls.__name__}"
        claim = ClaimedTrigger(
            number, 0, number, 4, "dag", "run", f"task{number}", -1, 1, classpath, json.dumps(kwargs), key, None
        )
        self.deferred[number] = one = Deferred(claim)
        self.ring()
        return one

    def start(self, classpath: str, kwargs: Any, start: StartClaim) -> Deferred:
        """Have a task start in its trigger."""
        one = self.defer(classpath)
        one.claim = msgspec.structs.replace(one.claim, kwargs=json.dumps(kwargs), start=start)
        return one

    def stop(self, one: Deferred, reason: str) -> None:
        """Have the task move on, for a reason."""
        one.stop = reason
        self.ring()

    def lose(self, session: int) -> None:
        """End a service from outside."""
        self.live.discard(session)
        for one in self.deferred.values():
            if one.session == session:
                one.session = None
        self.ring()

    def lines(self, one: Deferred) -> list[TaskLine]:
        """Return what stands in the log of a task."""
        parts = self.parts[one.claim.task]
        return [line for number in sorted(parts) for line in decode_lines(zlib.decompress(parts[number].data))]

    label = "in memory"

    @property
    def doorbell(self) -> Any:
        return self

    async def close(self) -> None:
        return

    # -- the bell -----------------------------------------------------------------------------------------------

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, channel: Any, timeout_seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._rung.wait(), timeout_seconds)
        except TimeoutError:
            return False
        self._rung.clear()
        return True

    # -- the calls ----------------------------------------------------------------------------------------------

    async def call(self, request: Any) -> Any:
        self.requests.append(request)
        await asyncio.sleep(0)
        when = self.fail(request)
        if when == "before":
            raise RemoteError("the store is away")
        answer = self._answer(request)
        if when == "after":
            raise RemoteError("the answer is lost")
        return answer

    def _answer(self, request: Any) -> Any:
        session = getattr(request, "session", None)
        if session is not None and session not in self.live and not isinstance(request, BeatSession):
            raise CallRefusedError(RefusalKind.FENCED, "the service has ended")
        number = getattr(request, "request", None)
        if number is None or isinstance(request, BeginSession):
            return self._carry_out(request)
        kept = self._answers.get((type(request), request.session))
        if kept is None or kept[0] != number:
            kept = self._answers[type(request), request.session] = number, self._carry_out(request)
        return kept[1]

    def _carry_out(self, request: Any) -> Any:
        match request:
            case BeginSession():
                self._services += 1
                self.live.add(self._services)
                return self._services
            case BeatSession(session=session):
                return session in self.live
            case EndSession(session=session):
                self.lose(session)
                self.ended.append(session)
                return True
            case StopSession() | ReleaseLeft():
                return 0
            case ListLoads():
                return tuple(self.loads)
            case KillCalled(kill=kill, error=error):
                self.kills.append((kill, error))
                return True
            case ClaimTriggers():
                return self._claim(request)
            case StoreEvents(events=events):
                return tuple(self._store(*event) for event in map(_fields, events))
            case FailTrigger():
                one = self.deferred[request.trigger]
                if one.token != request.token or one.stop:
                    return OutcomeKind.ALREADY if one.error == request.error else OutcomeKind.FENCED
                one.error, one.stop = request.error, "failed"
                return OutcomeKind.MOVED
            case CountUndelivered(triggers=triggers):
                return tuple((number, self.undelivered) for number in triggers)
            case HeldTriggers(session=session, held=held):
                return tuple(self._compare(session, *key) for key in held if self._compare(session, *key))
            case GetVariable(key=key):
                return self.variables.get(key)
            case ReleaseTriggers(session=session, triggers=released):
                for number, token in released:
                    if (self.deferred[number].session, self.deferred[number].token) == (session, token):
                        self.deferred[number].session = None
                return len(released)
            case PlaceTriggers(session=session, triggers=placed):
                elsewhere = tuple(number for number, _, _ in placed if number in self.elsewhere)
                for number in elsewhere:
                    self.deferred[number].session = None
                return elsewhere
            case AppendLog(parts=parts):
                for part in parts:
                    self.parts[part.task].setdefault(part.number, part)
                return None
        raise AssertionError(request)

    def _claim(self, request: ClaimTriggers) -> tuple[ClaimedTrigger, ...]:
        kills, self.kill_claims = self.kill_claims, []
        if self.holds:
            return tuple(kills)
        free = [one for one in self.deferred.values() if one.session is None and one.stop is None]
        claimed = []
        for one in free[: request.capacity]:
            one.session, one.token, one.claims = request.session, one.token + 1, one.claims + 1
            fields = {name: getattr(one.claim, name) for name in ClaimedTrigger.__struct_fields__}
            claimed.append(ClaimedTrigger(**fields | {"token": one.token}))
        return (*claimed, *kills)

    def _store(self, trigger: int, token: int, payload: str, ending: str | None) -> EventOutcome:
        one = self.deferred[trigger]
        if one.token != token or one.stop:
            return EventOutcome(EventOutcomeKind.FENCED)
        one.payload, one.stop, one.ending = decode(payload), "done", ending
        return EventOutcome(EventOutcomeKind.STORED, 0)

    def _compare(self, session: int, number: int, token: int) -> StoppedTrigger | None:
        one = self.deferred[number]
        if one.token != token or one.session != session:
            return StoppedTrigger(number, token, "hand-over")
        return StoppedTrigger(number, token, one.stop) if one.stop else None


def _fields(event: Any) -> tuple[int, int, str, str | None]:
    return event.trigger, event.token, event.payload, event.ending
