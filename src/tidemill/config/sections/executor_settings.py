"""The section `executor`: how tasks run, and how much may be in flight."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.sections.section import Section


class RetryBackoffSettings(Section):
    """The delay before a failed task is retried: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.5, description="The bound before the first retry.")
    max_seconds: PositiveFloat = Field(30.0, description="The upper limit of the bound.")
    multiplier: float = Field(2.0, ge=1, description="The factor by which the bound grows with each retry.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initial_seconds ({self.initial_seconds}) must not exceed max_seconds ({self.max_seconds})"
            )
        return self


class ResidentSettings(Section):
    """How copies of a program are kept alive and fed in resident mode."""

    args: list[str] = Field(default_factory=list, description="The arguments with which each copy is started.")
    framing: Literal["json", "length"] = Field(
        "json", description="json: one line each way; length: length-prefixed frames, for binary data."
    )
    recycle_after_tasks: NonNegativeInt = Field(
        0, description="The number of tasks after which a copy is replaced; 0: never."
    )
    send_ahead: NonNegativeInt = Field(
        0,
        description="While all copies are busy, each is sent up to this many more tasks: faster for short tasks, "
        "but a long one delays those sent after it.",
    )


class ExecutorSettings(Section):
    """The processes of tasks, their retries, and the limits on messages in flight."""

    binary_path: str = Field("", description="The program for tasks that do not name one.")
    max_executors: PositiveInt = Field(4, description="The number of concurrent task processes per engine.")
    mode: Literal["process", "resident"] = Field(
        "process",
        description="process: each task is a process; resident: max_executors copies of binary_path stay alive and "
        "receive the tasks.",
    )
    resident: ResidentSettings = Field(
        default_factory=ResidentSettings, description="How copies are kept alive and fed in resident mode."
    )
    task_timeout_seconds: PositiveFloat = Field(
        120.0, description="The wall-clock limit of tasks that set none of their own."
    )
    term_grace_seconds: NonNegativeFloat = Field(5.0, description="The time between SIGTERM and SIGKILL.")
    window_size: PositiveInt = Field(100, description="The maximum number of messages passed to `arrange` at once.")
    window_max_bytes: PositiveInt = Field(
        8 * 1024 * 1024, description="The maximum number of bytes passed to `arrange` at once."
    )
    window_linger_ms: NonNegativeInt = Field(
        0,
        description="How long a window that is not full waits for more messages; 0: it closes as soon as no more are "
        "waiting.",
    )
    max_queued_bytes: PositiveInt = Field(
        64 * 1024 * 1024,
        description="The number of bytes in flight per engine, in messages and in results waiting for a sink, above "
        "which the engine stops reading.",
    )
    max_retries: NonNegativeInt = Field(3, description="The maximum number of retries of a failed task.")
    retry_backoff: RetryBackoffSettings = Field(
        default_factory=RetryBackoffSettings, description="The delays before the retries of a failed task."
    )
    max_replacements: NonNegativeInt = Field(
        10,
        description="The maximum number of times in a row that `on_error` may replace a task; then the message becomes "
        "a dead letter.",
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        30.0, description="How long work in flight may take to finish during shutdown."
    )
    backpressure_high_multiplier: PositiveInt = Field(
        32,
        description="Multiplied by max_executors: the number of messages in flight per engine above which it stops "
        "reading.",
    )
    backpressure_low_multiplier: PositiveInt = Field(
        4, description="Multiplied by max_executors: the number of messages in flight below which it reads again."
    )
    max_uncommitted: PositiveInt = Field(
        10_000,
        description="The maximum number of messages per partition that are read but not committed, which is the most "
        "that a crash can repeat.",
    )
    max_stdout_bytes: PositiveInt = Field(16 * 1024 * 1024, description="A task that writes more to stdout fails.")
    max_stderr_bytes: PositiveInt = Field(1024 * 1024, description="A task that writes more to stderr fails.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables added to the environment of every task.")
    env_inherit_deny: list[str] = Field(
        default_factory=lambda: [
            "TIDEMILL_*",
            "*PASSWORD*",
            "*SECRET*",
            "*TOKEN*",
            "*_KEY",
            "*_DSN",
            "*CREDENTIAL*",
        ],
        description="Patterns of environment variables that tasks do not inherit.",
    )
    commit: Literal["message", "window"] = Field(
        "message",
        description="message: an offset waits for the payloads of its own message and tasks; window: it also waits for "
        "the payloads of `on_window_complete`.",
    )
    order_by: Literal["none", "key"] = Field(
        "none",
        description="none: tasks start in any order; key: a task waits until the tasks of earlier messages with the "
        "same key in its partition are done, including retries and hooks.",
    )
    max_failure_ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The failure brake: if more than this share of the last 200 finished messages failed (and at least "
        "50 have finished), the engine stops taking messages and holds failed ones until a trial succeeds or `tidemill "
        "release` is run; null: no brake.",
    )
    offload_threads: PositiveInt = Field(
        4, description="The number of concurrent blocking calls of `self.offload` per engine."
    )
    block_seconds: NonNegativeFloat = Field(
        0.5, description="A hook that blocks the event loop for longer is reported in the log; 0: never."
    )

    stall_seconds: PositiveFloat = Field(
        60.0,
        description="A partition that has work but commits nothing for this long is reported in the log, with the "
        "message that holds it up and the reason.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        problems = []
        if self.backpressure_low_multiplier >= self.backpressure_high_multiplier:
            problems.append(
                f"backpressure_low_multiplier ({self.backpressure_low_multiplier}) must be below "
                f"backpressure_high_multiplier ({self.backpressure_high_multiplier})"
            )
        if self.window_max_bytes > self.max_queued_bytes:
            problems.append(
                f"window_max_bytes ({self.window_max_bytes}) must not exceed max_queued_bytes ({self.max_queued_bytes})"
            )
        if self.mode == "resident" and not self.binary_path:
            problems.append(
                "mode resident keeps copies of binary_path running, so set binary_path too (in code, set it first)"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
