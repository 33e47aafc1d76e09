"""The section `executor`: how tasks run, how much may be in flight, and when an engine takes less."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.section import Section


class RetryBackoffSettings(Section):
    """How long a failed task waits before it is retried: full jitter below an exponential bound."""

    initial_seconds: PositiveFloat = Field(0.5, description="The bound before the first retry.")
    max_seconds: PositiveFloat = Field(30.0, description="The bound stops growing here.")
    multiplier: float = Field(2.0, ge=1, description="Factor by which the bound grows with each retry.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.initial_seconds > self.max_seconds:
            raise ValueError(
                f"initial_seconds ({self.initial_seconds}) must not exceed max_seconds ({self.max_seconds})"
            )
        return self


class ResidentSettings(Section):
    """How copies of a program are kept alive and fed, in the mode resident."""

    args: list[str] = Field(default_factory=list, description="The arguments that each copy is started with.")
    framing: Literal["json", "length"] = Field(
        "json", description="json: one line each way; length: length-prefixed frames, for binary data."
    )
    recycle_after_tasks: NonNegativeInt = Field(0, description="A copy is replaced after this many tasks; 0: never.")
    send_ahead: NonNegativeInt = Field(
        0,
        description="While all copies are busy, each is sent up to this many more tasks: faster for short tasks, "
        "but a long one delays those sent after it.",
    )


class ExecutorSettings(Section):
    """How tasks run and how much may be in flight."""

    binary_path: str = Field("", description="The program of tasks that do not name one.")
    max_executors: PositiveInt = Field(4, description="Concurrent processes, per engine.")
    mode: Literal["process", "resident"] = Field(
        "process",
        description="process: each task is a process; resident: max_executors copies of binary_path stay alive and are "
        "fed tasks.",
    )
    resident: ResidentSettings = Field(
        default_factory=ResidentSettings, description="How copies are kept alive and fed, in the mode resident."
    )
    task_timeout_seconds: PositiveFloat = Field(
        120.0, description="Wall-clock limit of tasks without a limit of their own."
    )
    term_grace_seconds: NonNegativeFloat = Field(5.0, description="Time between SIGTERM and SIGKILL.")
    window_size: PositiveInt = Field(100, description="The most messages passed to `arrange` at once.")
    window_max_bytes: PositiveInt = Field(8 * 1024 * 1024, description="The most bytes passed to `arrange` at once.")
    window_linger_ms: NonNegativeInt = Field(0, description="0: a window closes as soon as nothing more is waiting.")
    max_queued_bytes: PositiveInt = Field(
        64 * 1024 * 1024,
        description="Bytes in flight, per engine: messages, and results waiting for a sink; above this, it stops "
        "reading.",
    )
    max_retries: NonNegativeInt = Field(3, description="How often a failed task is retried.")
    retry_backoff: RetryBackoffSettings = Field(
        default_factory=RetryBackoffSettings, description="How long a failed task waits before it is retried."
    )
    max_replacements: NonNegativeInt = Field(
        10, description="How many times in a row `on_error` may replace a task; then a dead letter."
    )
    drain_timeout_seconds: NonNegativeFloat = Field(
        30.0, description="How long work in flight may take to finish at a stop."
    )
    backpressure_high_multiplier: PositiveInt = Field(
        32, description="Times max_executors: messages in flight, per engine, above which it stops reading."
    )
    backpressure_low_multiplier: PositiveInt = Field(
        4, description="Times max_executors: messages in flight below which it reads again."
    )
    max_uncommitted: PositiveInt = Field(
        10_000, description="Messages read but not committed, per partition: the most that a crash can repeat."
    )
    max_stdout_bytes: PositiveInt = Field(16 * 1024 * 1024, description="A task that prints more fails.")
    max_stderr_bytes: PositiveInt = Field(1024 * 1024, description="A task that prints more fails.")
    env: dict[str, str] = Field(default_factory=dict, description="Added to the environment of every task.")
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
        description="Patterns of variables that tasks do not inherit.",
    )
    commit: Literal["message", "window"] = Field(
        "message", description="window: offsets wait for the window's own payloads too."
    )
    order_by: Literal["none", "key"] = Field(
        "none",
        description="key: a task starts once the tasks of earlier messages with the same key in its partition are "
        "done, retries and hooks included.",
    )
    max_failure_ratio: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The brake: if more than this share of the last 200 finished messages failed (and at least 50 have "
        "finished), the engine stops taking messages and holds those that fail, until a trial succeeds or "
        "`tidemill release` is run; null: no brake.",
    )
    offload_threads: PositiveInt = Field(4, description="Concurrent blocking calls of `self.offload`, per engine.")
    block_seconds: NonNegativeFloat = Field(
        0.5, description="A hook that blocks the event loop for longer is named in the log; 0: never."
    )

    stall_seconds: PositiveFloat = Field(
        60.0,
        description="A partition with work of which nothing is committed for this long is named in the log, with the "
        "message that holds it up and what that waits for.",
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
