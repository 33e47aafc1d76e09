"""Redrives dead letters for the web UI, with the code and the cursor of `tidemill dlq redrive`.

A redrive starts with a dry run, which counts; only the letters that it counted can then be sent. Invariants: one
redrive or dry run runs at a time, on its own thread. At shutdown it finishes its batch, or it is killed and its cursor
keeps the last saved position; the process waits only briefly. Only what the targets have confirmed counts as sent.
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
from tidemill.core.deadletters.redrive import UnsentReason
from tidemill.core.errors import TidemillError
from tidemill.core.wording import format_count
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.deadletters.redrive.targets import RedriveItem
from tidemill.web.problems import RequestProblem

log = structlog.get_logger(__name__)

#: How many ended runs are stored, and how long a dry run can be confirmed.
KEPT = 20
CONFIRM_SECONDS = 3600.0
#: How long the shutdown waits for the current batch.
END_SECONDS = 1.5
#: How often progress is recorded.
_SHOWN_SECONDS = 0.2
_MAX_DESTINATIONS = 50
_MAX_FAILED = 50
_MAX_TEXT_CHARS = 500


@dataclass(frozen=True, slots=True)
class RedriveState:
    """A redrive, or the dry run of one.

    Attributes:
        number: The number of the redrive, counted from the start of the process.
        redrive_id: An unguessable id for later requests.
        order: The letters to send, and their target.
        by: The user that started it.
        began_at: Seconds since the epoch.
        ended_at: Seconds since the epoch; None while it runs.
        ended: end, limit, stopped or error; '' while it runs.
        error: Why it ended early.
        resumed: Whether it continues an earlier redrive with the same order.
        total: How many records there are to read.
        read: How many records were read.
        letters: How many letters were sent, or would be.
        messages: How many messages or payloads these letters hold.
        not_sent: How many matching letters were not sent, by reason.
        failed: The ids and reasons of the first failures.
        lost: How many messages cannot be sent because they did not fit into their letters.
        destinations: In a dry run: how many letters would go to each target.
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
    destinations: dict[str, int] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_at is None


class RedriveDesk:
    """The redrives of a process.

    Args:
        settings: The pipeline's settings.
        note: Records an action and its user.
        clock: Returns the time, in seconds since the epoch.
    """

    def __init__(
        self, settings: Settings, note: Callable[[str, str], None], clock: Callable[[], float] = time.time
    ) -> None:
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
        """Return the redrives of this process, newest first."""
        with self._lock:
            return list(reversed(self._states))

    def find(self, redrive_id: str) -> RedriveState:
        """Return one redrive.

        Raises:
            Problem: There is no redrive with this id.
        """
        found = next((state for state in self.list_all() if state.redrive_id == redrive_id), None)
        if found is None:
            raise RequestProblem(404, f"this process has no redrive {redrive_id!r}; start with a dry run")
        return found

    def count(self, order: RedriveOrder, by: str) -> RedriveState:
        """Start a dry run, which sends nothing.

        Raises:
            Problem: A redrive is running.
        """
        return self._begin(msgspec.structs.replace(order, dry_run=True), by)

    def send(self, redrive_id: str, letters: int, by: str) -> RedriveState:
        """Send the letters that a dry run counted.

        Args:
            redrive_id: The id of the dry run.
            letters: The number of letters that the user confirms.
            by: The user that starts the redrive.

        Raises:
            Problem: The number differs from the count, the dry run is too old, or a redrive is running.
        """
        dry = self.find(redrive_id)
        if not dry.order.dry_run or dry.is_running or dry.ended not in ("end", "limit"):
            raise RequestProblem(409, "only a completed dry run can be confirmed; start a new one")
        if self._clock() - (dry.ended_at or 0.0) > CONFIRM_SECONDS:
            raise RequestProblem(409, "this dry run is more than an hour old; start a new one")
        if letters != dry.letters or not letters:
            raise RequestProblem(
                409, f"the dry run counted {format_count(dry.letters, 'letter')}, not {letters:,}; confirm its count"
            )
        # The limit leaves out letters that were written after the count.
        return self._begin(msgspec.structs.replace(dry.order, dry_run=False, limit=letters), by)

    def stop(self, by: str) -> RedriveState:
        """Ask the running redrive to end after its current batch.

        Raises:
            Problem: No redrive is running.
        """
        with self._lock:
            newest = self._states[-1] if self._states else None
            if newest is None or not newest.is_running:
                raise RequestProblem(409, "no redrive is running")
            self._stop.set()
        if not newest.order.dry_run:
            self._note(f"stop redrive {newest.number}", by)
        return newest

    def close(self) -> None:
        """Stop the running redrive; blocks briefly."""
        self._is_closed = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _begin(self, order: RedriveOrder, by: str) -> RedriveState:
        with self._lock:
            newest = self._states[-1] if self._states else None
            if newest is not None and newest.is_running:
                what = "a dry run" if newest.order.dry_run else "a redrive"
                raise RequestProblem(
                    409, f"{what} of these dead letters is running (started by {newest.by}); stop it, or wait"
                )
            if self._is_closed:
                raise RequestProblem(503, "the pipeline is shutting down")
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
        destinations: dict[str, int] = {}

        def show(item: RedriveItem) -> None:
            target = (
                item.where if item.where in destinations or len(destinations) < _MAX_DESTINATIONS else "other targets"
            )
            destinations[target] = destinations.get(target, 0) + 1

        shown_at = 0.0

        def watch(redrive: Redrive) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= _SHOWN_SECONDS:
                shown_at = time.monotonic()
                self._replace(_describe(begun, redrive, destinations))

        redrive = Redrive(self._settings, begun.order, self._stop.is_set, watch, show)
        ended, error = "error", ""
        try:
            redrive.run()
            ended = "stopped" if self._stop.is_set() and redrive.left else "limit" if redrive.left else "end"
        except TidemillError as raised:
            error = redact_text(str(raised))
        except BaseException:
            log.exception("a redrive failed")
            error = "internal error in tidemill; see the log of this process"
        last = _describe(begun, redrive, destinations)
        self._replace(replace(last, ended=ended, error=error, ended_at=self._clock()))
        if not begun.order.dry_run:
            counted = format_count(last.letters, "letter")
            self._note(
                f"redrive {begun.number} ended ({ended}): {counted} sent{f'; {error}' if error else ''}", begun.by
            )

    def _replace(self, state: RedriveState) -> None:
        with self._lock:
            for index, known in enumerate(self._states):
                if known.redrive_id == state.redrive_id:
                    self._states[index] = state


def name_target(order: RedriveOrder) -> str:
    """Return the target of the letters: source, sink, or a topic."""
    return order.topic or order.target.value


def _describe(begun: RedriveState, redrive: Redrive, destinations: dict[str, int]) -> RedriveState:
    tally = redrive.tally
    return replace(
        begun,
        resumed=redrive.resumed,
        total=redrive.total,
        read=redrive.total - redrive.left,
        letters=tally.sent,
        messages=tally.messages,
        not_sent={why.value: count for why, count in tally.why.items() if why is not UnsentReason.NOT_SELECTED},
        failed=tuple(
            (letter_id, redact_text(text)[:_MAX_TEXT_CHARS]) for letter_id, _, text in tally.failed[:_MAX_FAILED]
        ),
        lost=tally.lost_messages,
        destinations=dict(destinations),
    )
