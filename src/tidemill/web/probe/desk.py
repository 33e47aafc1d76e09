"""Has an engine probe messages, one at a time, and keeps what the last probe found.

A probe may take as long as a request may, so it has a thread of its own, and its reader asks for the result. Invariant:
one probe runs at a time, whoever began it.
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
from tidemill.spark.live.web_ui import Engines
from tidemill.web.problems import Problem

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeState:
    """A probe.

    Attributes:
        number: Which of this process.
        message: What is probed.
        recorded: Whether it was read from its topic.
        by: Who began it.
        began_at: In seconds since the epoch.
        ended_at: None: it runs.
        report: What it found; None: it runs, or there is a problem.
        problem: Why nothing was found.
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
        engines: Where messages are probed.
        note: Records what was done and by whom.
        seconds: How long a probe may take.
        clock: The time, in seconds since the epoch.
    """

    def __init__(
        self,
        engines: Engines,
        note: Callable[[str, str], None],
        seconds: float = PROBE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Probe nothing yet."""
        self._engines = engines
        self._note = note
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: ProbeState | None = None

    def find_newest(self) -> ProbeState | None:
        """Return the probe that runs, or the last one; None: there was none."""
        return self._newest

    def refuse_second(self) -> None:
        """Refuse what would be a second probe.

        Raises:
            Problem: One runs.
        """
        newest = self.find_newest()
        if newest is not None and newest.ended_at is None:
            text = f"another message is being probed (begun by {newest.by}); try again when that has ended"
            raise Problem(429, text, {"Retry-After": "5"})

    def begin(self, message: SourceMessage, by: str, *, recorded: bool) -> ProbeState:
        """Begin to probe a message.

        Args:
            message: The message.
            by: Who begins it.
            recorded: Whether it was read from its topic.

        Raises:
            Problem: Another one is being probed.
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
            problem = "an error inside tidemill; see the log of the process"
        with self._lock:
            self._newest = replace(state, report=report, problem=problem, ended_at=self._clock())


def describe(state: ProbeState) -> str:
    """Return what a probe is about, as it is recorded."""
    message = state.message
    place = f"{message.topic}:{message.partition}:{message.offset}"
    return f"message {place}" if state.recorded else f"a pasted message as {place} ({measure(message):,} bytes)"


def measure(message: SourceMessage) -> int:
    """Return the bytes of key, value and headers."""
    return message.size_bytes + sum(len(name) + len(value or b"") for name, value in message.headers)
