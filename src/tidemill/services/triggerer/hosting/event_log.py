"""Logs stored events, one line each up to a limit, and sums up the rest.

Invariant: every stored event has a line of its own or is counted in a later line. Payloads are not logged: they are the
user's data, and `tidemill triggers events` shows them.
"""

from __future__ import annotations

import structlog

from tidemill.core.triggers.event_plan import Duplicate, StoreOutcome

log = structlog.get_logger(__name__)

#: At most this many events per interval have a line of their own.
MAX_LINES = 10
INTERVAL_SECONDS = 10.0
#: Longer identities are cut.
_MAX_SHOWN = 100


class HostEventLog:
    """The log lines of the events that a host stores.

    Example:
        >>> events = HostEventLog(now=0.0)
        >>> events.flush(now=5.0)  # nothing was stored: nothing is logged
    """

    __slots__ = ("_began_at", "_left_out", "_lines")

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._lines = 0
        self._left_out = 0

    def note(self, trigger: str, outcome: StoreOutcome, identity: str | None) -> None:
        """Log a stored event, unless it is a duplicate.

        Args:
            trigger: The trigger's name.
            outcome: The store's answer.
            identity: The identity of the event.
        """
        if isinstance(outcome, Duplicate):
            return
        if self._lines >= MAX_LINES:
            self._left_out += 1
            return
        self._lines += 1
        details = {} if identity is None else {"identity": identity[:_MAX_SHOWN]}
        log.info("event stored", trigger=trigger, sequence=getattr(outcome, "sequence_index", None), **details)

    def flush(self, now: float, *, last: bool = False) -> None:
        """Log how many events had no line of their own. Call it regularly, and once with `last` at the end."""
        if not last and now - self._began_at < INTERVAL_SECONDS:
            return
        if self._left_out:
            log.info("more events stored", left_out=self._left_out, in_seconds=round(max(0.0, now - self._began_at), 1))
        self._began_at = now
        self._lines = self._left_out = 0
