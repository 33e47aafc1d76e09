"""The stage of an open message: every point at which a message can wait, and the text for it.

The stall watch, `tidemill trace` and the web UI all use the text of `describe`. Invariant: the fields hold everything
that a stage needs besides its name; text from users occurs only in `task_id` and `why`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

_MAX_TASK_CHARS = 100


class OpenStage(enum.StrEnum):
    """The stage of an open message."""

    NO_OWNER = "no owner"
    NOT_READ = "not read"
    BUFFERED = "buffered"
    WINDOW = "window"
    ARRANGE = "arrange"
    BEHIND_KEY = "behind its key"
    QUEUED = "queued"
    TASK = "task"
    BACKOFF = "back-off"
    BRAKE = "held by the failure brake"
    HOOK = "hook"
    SINK = "sink"
    DEAD_LETTER = "dead letter"
    TRANSACTION = "transaction"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStage:
    """The stage of a message, with details.

    Attributes:
        stage: What the message waits for.
        seconds: How long it has waited, if known.
        why: The reason or the last error, in words.
        task_id: The task.
        attempt: The task's running attempt, or the last one that failed.
        attempts: The maximum number of attempts.
        pid: The task's process.
        next_seconds: The time until the next attempt.
        behind: The offset of the message that goes first.
        hook: The hook that has not returned.
        sink: The sink, by its key in the configuration.

    Example:
        >>> MessageStage(stage=OpenStage.TASK, task_id="t-1", seconds=3.2, pid=42).describe()
        'task t-1 has been running for 3 s (process 42)'
    """

    stage: OpenStage
    seconds: float | None = None
    why: str = ""
    task_id: str | None = None
    attempt: int | None = None
    attempts: int | None = None
    pid: int | None = None
    next_seconds: float | None = None
    behind: int | None = None
    hook: str | None = None
    sink: str | None = None

    def summarize(self) -> str:
        """Return a text that stays the same while the message stays in its stage: without times and last errors.

        Example:
            >>> MessageStage(stage=OpenStage.TASK, task_id="t-1", seconds=3.2, pid=42).summarize()
            'task t-1 runs (process 42)'
        """
        task = f"task {(self.task_id or '')[:_MAX_TASK_CHARS]}"
        match self.stage:
            case OpenStage.TASK:
                return f"{task} runs" + (f" (process {self.pid})" if self.pid else "")
            case OpenStage.BACKOFF:
                return f"{task} is in backoff: attempt {self.attempt} of {self.attempts} failed"
            case OpenStage.ARRANGE | OpenStage.HOOK if self.seconds is not None:
                return f"{self.hook} has not returned"
            case OpenStage.SINK if self.sink:
                return f"its results wait for {self.sink}"
            case OpenStage.SINK | OpenStage.DEAD_LETTER | OpenStage.TRANSACTION | OpenStage.COMMIT:
                return replace(self, why="", seconds=None).describe()
            case _:
                return self.describe()

    def describe(self) -> str:
        """Return the stage in words, with times and the last error."""
        why = f" ({self.why})" if self.why else ""
        match self.stage:
            case OpenStage.NO_OWNER:
                return f"no engine owns its partition{why}"
            case OpenStage.NOT_READ:
                return f"it has not been read from its topic yet{why}"
            case OpenStage.BUFFERED:
                return f"it was read and waits to be taken: {self.why}"
            case OpenStage.WINDOW:
                return f"it waits for {self.why}"
            case OpenStage.ARRANGE:
                hook = self.hook or "arrange"
                return self._describe_call(hook, f"it waits for {hook}")
            case OpenStage.HOOK:
                return self._describe_call(f"hook {self.hook}", "it waits for a hook or a delivery")
            case OpenStage.BEHIND_KEY if self.task_id is None:
                return f"it {self._describe_task()}"
            case OpenStage.BRAKE:
                return f"held by the failure brake{why}"
            case OpenStage.DEAD_LETTER:
                return f"its dead letter is not confirmed{why}"
            case OpenStage.TRANSACTION:
                return f"its transaction is not committed{why}"
            case OpenStage.COMMIT:
                return f"its commit is not confirmed{why}"
            case OpenStage.SINK:
                if not self.why:
                    return f"its results wait for {self.sink}" if self.sink else "its results wait for their sinks"
                return f"its results are not delivered ({f'{self.sink}: ' if self.sink else ''}{self.why})"
            case _:
                return f"task {(self.task_id or '')[:_MAX_TASK_CHARS]} {self._describe_task()}"

    def _describe_call(self, name: str, otherwise: str) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{otherwise}{why}" if self.seconds is None else f"{name} has not returned for {self.seconds:.0f} s{why}"

    def _describe_task(self) -> str:
        if self.stage is OpenStage.BEHIND_KEY:
            which = "" if self.behind is None else f" (offset {self.behind})"
            return f"waits for an earlier message with its key{which}"
        if self.stage is OpenStage.BACKOFF:
            due = self.next_seconds or 0.0
            return f"is in backoff: attempt {self.attempt} of {self.attempts} failed, the next is in {due:.0f} s"
        if self.stage is OpenStage.QUEUED:
            return self.why
        process = f" (process {self.pid})" if self.pid else ""
        return f"has been running for {self.seconds or 0.0:.0f} s{process}"
