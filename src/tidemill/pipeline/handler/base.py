"""The user's part of a pipeline: a class whose hooks decide what happens to messages, results and errors.

Only `arrange`, or `transform` in its place, is required. A hook that is not overridden costs nothing, because the
engine does not call it.
"""

from __future__ import annotations

import asyncio
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import pydantic

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.cache import Cache, NoCache
from tidemill.pipeline.handler.models import (
    DeliveryAction,
    DeliveryError,
    ErrorAction,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    MessageGroup,
    PendingContext,
)
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import SinksByName
from tidemill.sinks.payloads import CollectResult, Payload

#: The hooks that receive windows; a handler overrides one of them.
WINDOW_HOOKS = ("arrange", "transform")
#: The hooks that are plain functions.
SYNCHRONOUS_HOOKS = ("deserialize_message", "message_label")
HOOKS = (
    *WINDOW_HOOKS,
    *("on_startup", "on_ready", "on_assign", "on_revoke", "on_task_complete"),
    *("on_message_complete", "on_window_complete", "on_error", "on_delivery_error", *SYNCHRONOUS_HOOKS),
)

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")

TopicPartition = tuple[str, int]


class Handler(Generic[InputT, OutputT]):
    """Processes the messages of a pipeline.

    `InputT` is parsed from the message's JSON value into `message.payload`; with a bare `Handler` (or `bytes`) the
    payload is the value itself. `OutputT` documents what the handler produces.

    `on_startup` runs once, on the driver. Then the handler is pickled, and attributes set so far travel to the engines.
    All other hooks run in the engines, each of which has one event loop: do not block in hooks, use `offload`.
    """

    #: False: a message without a value is dead-lettered (kind `tombstone`) instead of being passed to the handler.
    accept_tombstones: bool = True

    #: Values that survive restarts of the engine; needs `cache.enabled`, and is available in engines only.
    cache: Cache = cast(Cache, NoCache())

    async def on_startup(self, config: Settings) -> Settings | None:
        """Prepare on the driver; return a changed configuration, or None to leave it unchanged."""
        return None

    async def on_ready(self, config: Settings, sinks: SinksByName) -> None:
        """Prepare in an engine, after its sinks are connected and before the first message.

        Args:
            config: The settings of the pipeline.
            sinks: The engine's sinks by type and name, such as `sinks["postgres.main"]`. A PostgreSQL sink has a `pool`
                of connections for hooks.
        """

    async def on_assign(self, partitions: Sequence[TopicPartition]) -> None:
        """React to partitions that were assigned to this engine, in addition to those it already owns."""

    async def on_revoke(self, partitions: Sequence[TopicPartition]) -> None:
        """React to partitions that this engine gave up, after their running work was finished and committed."""

    async def offload(self, function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """Run a blocking call in a thread and await it, so that the engine continues meanwhile.

        At most `executor.offload_threads` calls run at once; others wait. The function must not use `self.cache`, which
        belongs to the event loop. Stopping the engine does not interrupt a running call; the process exits after it.

        Args:
            function: The function to call.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The function's result.
        """
        run = self.__dict__.get("_offload") or asyncio.to_thread  # no engine: on the driver, or in a test
        return cast(ResultT, await run(function, *args, **kwargs))

    def deserialize_message(self, message: SourceMessage) -> Any:
        """Return the payload of a message that has a value; an exception means that it cannot be parsed."""
        cls: Any = type(self)
        return _find_parser(cls)(message.value)

    def message_label(self, message: SourceMessage) -> str:
        """Return the name of a message for logs and records."""
        return f"{message.topic}/{message.partition}/{message.offset}"

    async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
        """Turn a window of messages of one partition into tasks; a message without tasks is done.

        Args:
            messages: The window's messages, in offset order.
            pending: The tasks of earlier windows that have not ended.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def arrange(self, messages, pending)`")

    async def transform(
        self, messages: Sequence[SourceMessage]
    ) -> Sequence[Payload | Sequence[Payload] | None] | CollectResult:
        """Return the payloads for a window of messages of one partition, without tasks; used in place of `arrange`.

        A list has one item per message, in the same order: a payload, a list of payloads, or None for no payloads. A
        `CollectResult` belongs to the whole window. If the hook raises, it is called again with smaller parts of the
        window, until the failing message is alone.

        Raises:
            SkipMessage: Skip the only message of the window.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def transform(self, messages)`")

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
        """Return the payloads for a task that succeeded."""
        return None

    async def on_message_complete(self, group: MessageGroup) -> CollectResult | None:
        """Return the payloads for a message whose tasks have all ended."""
        return None

    async def on_window_complete(
        self, results: Sequence[ExecutorResult | ExecutorError], messages: Sequence[SourceMessage]
    ) -> CollectResult | None:
        """Return the payloads for a window whose messages are all complete.

        Args:
            results: The results and final errors of the window's tasks, in the order in which they ended.
            messages: The window's messages, in offset order.
        """
        return None

    async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction | list[ExecutorTask]:
        """Decide what happens to a failed task; a list of tasks replaces it, and an empty list completes it.

        RETRY, the default, runs the task again with backoff, up to `executor.max_retries` times, and then acts like
        DLQ.
        """
        return ErrorAction.RETRY

    async def on_delivery_error(self, error: DeliveryError) -> DeliveryAction:
        """Decide what happens to payloads that a sink refused."""
        return DeliveryAction.DLQ


def overrides(handler: Handler[Any, Any], hook: str) -> bool:
    """Return whether the handler overrides a hook."""
    return getattr(type(handler), hook) is not getattr(Handler, hook) or hook in vars(handler)


@functools.cache
def _find_parser(cls: type[Handler[Any, Any]]) -> Any:
    input_type = find_input_type(cls)
    if input_type is None or input_type is bytes:
        return lambda value: value
    if input_type is str:
        return lambda value: value.decode()
    if isinstance(input_type, type) and issubclass(input_type, pydantic.BaseModel):
        return input_type.model_validate_json
    return pydantic.TypeAdapter(input_type).validate_json


def find_input_type(cls: type[Handler[Any, Any]]) -> Any:
    """Return the `InputT` of a handler class; None: it is not specified."""
    for klass in cls.__mro__:
        for base in klass.__dict__.get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Handler):
                first = typing.get_args(base)[0]
                return None if isinstance(first, TypeVar) or first is Any else first
    return None
