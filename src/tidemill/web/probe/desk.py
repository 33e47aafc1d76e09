"""Runs probes on an engine, one at a time, and stores the result of the last one.

A probe may take as long as a request, so it runs on its own thread and the page polls for the result. Invariant: only
one probe runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TidemillError
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.probe_report import PROBE_SECONDS, ProbeReport
from tidemill.spark.live.web_ui import EngineQuestions
from tidemill.web.problems import RequestProblem

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeState:
    """A probe.

    Attributes:
        number: The number of the probe, counted from the start of the process.
        message: The probed message.
        recorded: Whether the message was read from its topic.
        by: The user that started the probe.
        began_at: Seconds since the epoch.
        ended_at: Seconds since the epoch; None while it runs.
        report: The result; None while it runs, or if it failed.
        problem: Why the probe failed.
    """

    number: int
    message: SourceMessage
    recorded: bool
    by: str
    began_at: float
    ended_at: float | None = None
    report: ProbeReport | None = None
    problem: str = ""


class ProbeDesk:
    """The probes of a process.

    Args:
        engines: Probe the messages.
        note: Records an action and its user.
        seconds: How long a probe may take.
        clock: Returns the time, in seconds since the epoch.
    """

    def __init__(
        self,
        engines: EngineQuestions,
        note: Callable[[str, str], None],
        seconds: float = PROBE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engines = engines
        self._note = note
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: ProbeState | None = None

    def find_newest(self) -> ProbeState | None:
        """Return the running or else the last probe; None if there was none."""
        return self._newest

    def refuse_second(self) -> None:
        """Reject a second probe while one runs.

        Raises:
            Problem: A probe is running.
        """
        newest = self.find_newest()
        if newest is not None and newest.ended_at is None:
            text = f"another probe is running (started by {newest.by}); try again when it has ended"
            raise RequestProblem(429, text, {"Retry-After": "5"})

    def begin(self, message: SourceMessage, by: str, *, recorded: bool) -> ProbeState:
        """Start a probe.

        Args:
            message: The message to probe.
            by: The user that starts the probe.
            recorded: Whether the message was read from its topic.

        Raises:
            Problem: A probe is running.
        """
        with self._lock:
            self.refuse_second()
            number = self._newest.number + 1 if self._newest is not None else 1
            state = self._newest = ProbeState(number, message, recorded, by, self._clock())
        self._note(f"probe {describe(state)}", by)
        threading.Thread(target=self._run, args=(state,), name="tidemill-probe", daemon=True).start()
        return state

    def _run(self, state: ProbeState) -> None:
        report, problem = None, ""
        try:
            report = self._engines.probe(state.message, self._seconds)
        except TidemillError as error:
            problem = redact_text(str(error))
        except BaseException:
            log.exception("a probe failed")
            problem = "internal error in tidemill; see the log of this process"
        with self._lock:
            self._newest = replace(state, report=report, problem=problem, ended_at=self._clock())


def describe(state: ProbeState) -> str:
    """Return the description of a probe for the record of actions."""
    message = state.message
    position = f"{message.topic}:{message.partition}:{message.offset}"
    return f"message {position}" if state.recorded else f"a pasted message as {position} ({measure(message):,} bytes)"


def measure(message: SourceMessage) -> int:
    """Return the size of key, value and headers in bytes."""
    return message.size_bytes + sum(len(name) + len(value or b"") for name, value in message.headers)
