"""What a probe found: a message that went through the handler of a running engine, and left nothing behind.

All texts are masked and cut by the engine; times are seconds since the probe began.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from tidemill.runtime.messages import SourceMessage

#: How long a probe may take.
PROBE_SECONDS = 30.0
#: The largest message that is probed: key, value and headers.
MAX_PROBE_BYTES = 1024 * 1024


class ProbeStatus(enum.StrEnum):
    """How a probe ended."""

    DONE = "done"
    FAILED = "failed"
    UNFINISHED = "unfinished"


class ProbeText(msgspec.Struct, frozen=True):
    """A text of a handler, a program or a payload.

    Attributes:
        text: What is shown of it.
        is_cut: Whether there is more.
    """

    text: str
    is_cut: bool = False


class ProbeStage(msgspec.Struct, frozen=True):
    """A call of a hook.

    Attributes:
        hook: Its name.
        about: The task that it was called for; '': none.
        at: When it was called.
        seconds: How long it took; None: it has not returned.
        trace: What it raised, with its traceback; where it waits, if it has not returned; '': neither.
    """

    hook: str
    about: str
    at: float
    seconds: float | None
    trace: ProbeText


class ProbeAttempt(msgspec.Struct, frozen=True):
    """An attempt of a task.

    Attributes:
        attempt: Which one.
        at: When its process started, or was to start.
        seconds: How long it ran; None: it still runs.
        kind: ok, or the kind of its error; '': it still runs.
        exit_code: What it returned.
        pid: Its process; None: it never started.
        error: Why it failed, if that is not its exit code.
        stdout: The end of what it wrote.
        stderr: Likewise.
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
        task_id: Its id.
        parent: The task that it replaced; '': none.
        args: Its arguments.
        labels: Its labels.
        state: ok, failed, replaced, running, waiting (for an executor, or its next attempt) or hook (its process is
            over, and a hook is not).
        is_precomputed: Whether its result was known, so that nothing ran.
        attempts: What ran.
    """

    task_id: str
    parent: str
    args: list[str]
    labels: dict[str, str]
    state: str
    is_precomputed: bool
    attempts: list[ProbeAttempt]


class ProbePayload(msgspec.Struct, frozen=True):
    """A payload that a sink would have been given.

    Attributes:
        sink: The sink's place in the configuration.
        hook: The hook that returned it.
        task_id: The task that it was returned for; '': none.
        body: Its fields, as JSON.
    """

    sink: str
    hook: str
    task_id: str
    body: ProbeText


class ProbeLetter(msgspec.Struct, frozen=True):
    """A dead letter that would have been written.

    Attributes:
        kind: What went wrong.
        error: In words.
        task_id: The task concerned; '': none.
    """

    kind: str
    error: ProbeText
    task_id: str


class ProbeReport(msgspec.Struct, frozen=True):
    """What became of a message.

    Attributes:
        status: Whether it came to its end, and well.
        text: The same in words.
        seconds: How long it took.
        stages: Calls of hooks, in order.
        tasks: Its tasks, those that replaced others included.
        payloads: What sinks would have been given.
        sinks: How many payloads each sink would have been given.
        letters: The dead letters that would have been written.
        cache_writes: How many values hooks wrote to the cache, or deleted; nobody else sees them.
        left_out: How many stages, tasks, attempts, payloads and letters there was no room for.
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
    """What probes messages; an engine has one while the web UI is on."""

    async def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler; what it delivers goes nowhere.

        Args:
            message: The message.
            seconds: How long it may take.

        Raises:
            UserActionError: That is not possible now.
        """
        ...
