"""Sends dead letters again for the web UI, with the code and the cursor of `tidemill dlq redrive`.

A redrive begins with a dry run, which counts; what it counted, and no more, can then be sent. Invariants: one of them
runs at a time; each is a thread that nothing waits for for long: at the end of the process it sends its batch, or it is
killed and its cursor stands where it was saved last; only what the targets have confirmed counts as sent.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import Why
from tidemill.core.errors import TidemillError
from tidemill.core.wording import format_count
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.deadletters.redrive.targets import RedriveItem
from tidemill.web.problems import Problem

log = structlog.get_logger(__name__)

#: How many ended ones are kept, and how long a dry run may be confirmed.
KEPT = 20
CONFIRM_SECONDS = 3600.0
#: How long the end of the process waits for the batch that is being sent.
END_SECONDS = 1.5
#: How often progress is noted.
_SHOWN_SECONDS = 0.2
_MAX_PLACES = 50
_MAX_FAILED = 50
_MAX_TEXT_CHARS = 500


@dataclass(frozen=True, slots=True)
class RedriveState:
    """A redrive, or the dry run of one.

    Attributes:
        number: Which of this process.
        redrive_id: For later requests; nobody can guess it.
        order: What is sent, and where to.
        by: Who began it.
        began_at: In seconds since the epoch.
        ended_at: None: it runs.
        ended: end, limit, stopped or error; '' while it runs.
        error: Why it ended early.
        resumed: Whether it goes on where the same redrive ended before.
        total: How many records there are to read.
        read: How many were read.
        letters: Letters that were sent, or would be.
        messages: Their messages or payloads.
        not_sent: Letters that match and were not sent, by reason.
        failed: Id and reason of the first of them.
        lost: Messages that cannot be sent, since their letters had no room for them.
        places: In a dry run: how many letters would go where.
    """

    number: int
    redrive_id: str
    order: RedriveOrder
    by: str
    began_at: float
    ended_at: float | None = None
    ended: str = ""
    error: str = ""
    resumed: bool = False
    total: int = 0
    read: int = 0
    letters: int = 0
    messages: int = 0
    not_sent: dict[str, int] = field(default_factory=dict)
    failed: tuple[tuple[str, str], ...] = ()
    lost: int = 0
    places: dict[str, int] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_at is None


class RedriveDesk:
    """The redrives of a process.

    Args:
        settings: The pipeline's.
        note: Records what was done and by whom.
        clock: The time, in seconds since the epoch.
    """

    def __init__(
        self, settings: Settings, note: Callable[[str, str], None], clock: Callable[[], float] = time.time
    ) -> None:
        """Run nothing yet."""
        self._settings = settings
        self._note = note
        self._clock = clock
        self._lock = threading.Lock()
        self._states: deque[RedriveState] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._count = 0

    def list_all(self) -> list[RedriveState]:
        """Return those of this process, the newest first."""
        with self._lock:
            return list(reversed(self._states))

    def find(self, redrive_id: str) -> RedriveState:
        """Return one.

        Raises:
            Problem: There is none with this id.
        """
        found = next((state for state in self.list_all() if state.redrive_id == redrive_id), None)
        if found is None:
            raise Problem(404, f"no redrive {redrive_id!r} of this process; begin with a dry run")
        return found

    def count(self, order: RedriveOrder, by: str) -> RedriveState:
        """Begin a dry run: it sends nothing.

        Raises:
            Problem: A redrive runs already.
        """
        return self._begin(msgspec.structs.replace(order, dry_run=True), by)

    def send(self, redrive_id: str, letters: int, by: str) -> RedriveState:
        """Send what a dry run counted.

        Args:
            redrive_id: Of the dry run.
            letters: How many letters it counted, as its reader confirms.
            by: Who begins it.

        Raises:
            Problem: That is not what it counted, or it is too old, or a redrive runs already.
        """
        dry = self.find(redrive_id)
        if not dry.order.dry_run or dry.is_running or dry.ended not in ("end", "limit"):
            raise Problem(409, "only a dry run that came to its end can be confirmed; begin with one")
        if self._clock() - (dry.ended_at or 0.0) > CONFIRM_SECONDS:
            raise Problem(409, "this dry run is more than an hour old; begin with another one")
        if letters != dry.letters or not letters:
            raise Problem(409, f"the dry run counted {format_count(dry.letters, 'letter')}, and not {letters:,}")
        # Letters that were written meanwhile were not counted.
        return self._begin(msgspec.structs.replace(dry.order, dry_run=False, limit=letters), by)

    def stop(self, by: str) -> RedriveState:
        """Ask the running one to end after its batch.

        Raises:
            Problem: None runs.
        """
        with self._lock:
            newest = self._states[-1] if self._states else None
            if newest is None or not newest.is_running:
                raise Problem(409, "no redrive runs")
            self._stop.set()
        if not newest.order.dry_run:
            self._note(f"stop redrive {newest.number}", by)
        return newest

    def close(self) -> None:
        """End with the process; blocks for a moment."""
        self._is_closed = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _begin(self, order: RedriveOrder, by: str) -> RedriveState:
        with self._lock:
            newest = self._states[-1] if self._states else None
            if newest is not None and newest.is_running:
                what = "a dry run" if newest.order.dry_run else "a redrive"
                raise Problem(409, f"{what} of these dead letters is running (begun by {newest.by}); stop it, or wait")
            if self._is_closed:
                raise Problem(503, "the pipeline is ending")
            self._count += 1
            state = RedriveState(self._count, secrets.token_urlsafe(12), order, by, self._clock())
            self._states.append(state)
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(state,), name="tidemill-redrive", daemon=True)
            self._thread.start()
        if not order.dry_run:
            self._note(
                f"redrive {state.number}: {format_count(order.limit or 0, 'letter')} to {name_target(order)}", by
            )
        return state

    def _run(self, begun: RedriveState) -> None:
        places: dict[str, int] = {}

        def show(item: RedriveItem) -> None:
            place = item.where if item.where in places or len(places) < _MAX_PLACES else "other places"
            places[place] = places.get(place, 0) + 1

        shown_at = 0.0

        def watch(redrive: Redrive) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= _SHOWN_SECONDS:
                shown_at = time.monotonic()
                self._replace(_describe(begun, redrive, places))

        redrive = Redrive(self._settings, begun.order, self._stop.is_set, watch, show)
        ended, error = "error", ""
        try:
            redrive.run()
            ended = "stopped" if self._stop.is_set() and redrive.left else "limit" if redrive.left else "end"
        except TidemillError as raised:
            error = redact_text(str(raised))
        except BaseException:
            log.exception("a redrive failed")
            error = "an error inside tidemill; see the log of the process"
        last = _describe(begun, redrive, places)
        self._replace(replace(last, ended=ended, error=error, ended_at=self._clock()))
        if not begun.order.dry_run:
            counted = format_count(last.letters, "letter")
            self._note(
                f"redrive {begun.number} ended ({ended}): {counted} sent{f'; {error}' if error else ''}", begun.by
            )

    def _replace(self, state: RedriveState) -> None:
        with self._lock:
            for place, known in enumerate(self._states):
                if known.redrive_id == state.redrive_id:
                    self._states[place] = state


def name_target(order: RedriveOrder) -> str:
    """Return where letters go: source, sink, or a topic."""
    return order.topic or order.target.value


def _describe(begun: RedriveState, redrive: Redrive, places: dict[str, int]) -> RedriveState:
    tally = redrive.tally
    return replace(
        begun,
        resumed=redrive.resumed,
        total=redrive.total,
        read=redrive.total - redrive.left,
        letters=tally.sent,
        messages=tally.messages,
        not_sent={why.value: count for why, count in tally.why.items() if why is not Why.NOT_SELECTED},
        failed=tuple(
            (letter_id, redact_text(text)[:_MAX_TEXT_CHARS]) for letter_id, _, text in tally.failed[:_MAX_FAILED]
        ),
        lost=tally.lost_messages,
        places=dict(places),
    )
