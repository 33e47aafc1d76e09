"""The report of a probe: a message that went through the handler of a running engine without leaving a trace.

The engine masks and cuts all texts; times are seconds since the probe began.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from tidemill.runtime.kafka.source_message import SourceMessage

#: How long a probe may take.
PROBE_SECONDS = 30.0
#: The largest message that can be probed: key, value and headers.
MAX_PROBE_BYTES = 1024 * 1024


class ProbeStatus(enum.StrEnum):
    """How a probe ended."""

    DONE = "done"
    FAILED = "failed"
    UNFINISHED = "unfinished"


class ProbeText(msgspec.Struct, frozen=True):
    """A text of a handler, a program or a payload.

    Attributes:
        text: The part that is shown.
        is_cut: Whether there is more.
    """

    text: str
    is_cut: bool = False


class ProbeStage(msgspec.Struct, frozen=True):
    """A call of a hook.

    Attributes:
        hook: The hook's name.
        about: The task that the hook was called for; '' for none.
        at: When it was called.
        seconds: How long it took; None if it has not returned.
        trace: The traceback if it raised, or its current position if it has not returned; otherwise ''.
    """

    hook: str
    about: str
    at: float
    seconds: float | None
    trace: ProbeText


class ProbeAttempt(msgspec.Struct, frozen=True):
    """An attempt of a task.

    Attributes:
        attempt: The attempt's number.
        at: When its process started, or was to start.
        seconds: How long it ran; None if it is still running.
        kind: ok, or the kind of its error; '' if it is still running.
        exit_code: The process's exit code.
        pid: The process; None if it never started.
        error: Why the attempt failed, if the exit code is not the reason.
        stdout: The end of its standard output.
        stderr: The end of its standard error.
    """

    attempt: int
    at: float
    seconds: float | None
    kind: str
    exit_code: int | None
    pid: int | None
    error: ProbeText
    stdout: ProbeText
    stderr: ProbeText


class ProbeTask(msgspec.Struct, frozen=True):
    """A task.

    Attributes:
        task_id: The task's id.
        parent: The task that it replaced; '' for none.
        args: The task's arguments.
        labels: The task's labels.
        state: ok, failed, replaced, running, waiting (for an executor, or its next attempt) or hook (its process has
            ended, but a hook has not).
        is_precomputed: Whether its result was known, so that no process ran.
        attempts: The attempts that ran.
    """

    task_id: str
    parent: str
    args: list[str]
    labels: dict[str, str]
    state: str
    is_precomputed: bool
    attempts: list[ProbeAttempt]


class ProbePayload(msgspec.Struct, frozen=True):
    """A payload that a sink would have received.

    Attributes:
        sink: The sink's section in the configuration.
        hook: The hook that returned it.
        task_id: The task that it was returned for; '' for none.
        body: The payload's fields, as JSON.
    """

    sink: str
    hook: str
    task_id: str
    body: ProbeText


class ProbeLetter(msgspec.Struct, frozen=True):
    """A dead letter that would have been written.

    Attributes:
        kind: The step at which the message failed.
        error: The error, for people to read.
        task_id: The task that failed; '' for none.
    """

    kind: str
    error: ProbeText
    task_id: str


class ProbeReport(msgspec.Struct, frozen=True):
    """The report on a probed message.

    Attributes:
        status: Whether processing finished, and succeeded.
        text: The status in words.
        seconds: How long it took.
        stages: Calls of hooks, in order.
        tasks: The message's tasks, including those that replaced others.
        payloads: The payloads that sinks would have received.
        sinks: How many payloads each sink would have received.
        letters: The dead letters that would have been written.
        cache_writes: How many values hooks wrote to the cache, or deleted; these changes are not visible outside the
            probe.
        left_out: How many stages, tasks, attempts, payloads and letters did not fit into the report.
    """

    status: ProbeStatus
    text: str
    seconds: float
    stages: list[ProbeStage] = []
    tasks: list[ProbeTask] = []
    payloads: list[ProbePayload] = []
    sinks: dict[str, int] = {}
    letters: list[ProbeLetter] = []
    cache_writes: int = 0
    left_out: int = 0


class ProbeSource(Protocol):
    """Probes messages; an engine has one while the web UI is on."""

    async def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler and discard its payloads.

        Args:
            message: The message.
            seconds: How long the probe may take.

        Raises:
            UserActionError: The message cannot be probed now.
        """
        ...
