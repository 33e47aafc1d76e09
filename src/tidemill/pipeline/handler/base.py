"""The user's side of a pipeline: a class whose hooks say what to do with messages, results and errors.

Only `arrange`, or `transform` instead of it, must be written. A hook that is not overridden costs nothing: the engine
does not call it.
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
from tidemill.runtime.messages import SourceMessage
from tidemill.sinks.base import SinksByName
from tidemill.sinks.payloads import CollectResult, Payload

#: The hooks that are given windows: a handler has one of them.
WINDOW_HOOKS = ("arrange", "transform")
#: The hooks that are plain functions, and all of them.
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
    """What a pipeline does with its messages.

    `InputT` is parsed from the message's JSON value into `message.payload`; with a bare `Handler` (or `bytes`) the
    payload is the value itself. `OutputT` documents what the handler produces.

    `on_startup` runs once, on the driver; after it the handler is pickled, and the attributes set until then travel
    to the engines. All other hooks run in the engines, on one event loop each: do not block in them.
    """

    #: False: a message without value is dead-lettered (kind `tombstone`) instead of being handed to the handler.
    accept_tombstones: bool = True

    #: Values that outlive the engine, in the engines of a pipeline with `cache.enabled`.
    cache: Cache = cast(Cache, NoCache())

    async def on_startup(self, config: Settings) -> Settings | None:
        """Prepare on the driver; return a changed configuration, or None to keep it."""
        return None

    async def on_ready(self, config: Settings, sinks: SinksByName) -> None:
        """Prepare in an engine, after its sinks are connected and before the first message.

        Args:
            config: The settings of the pipeline.
            sinks: The engine's sinks by type and name, such as `sinks["postgres.main"]`. A PostgreSQL sink has a
                `pool` of connections for hooks.
        """

    async def on_assign(self, partitions: Sequence[TopicPartition]) -> None:
        """React to partitions that this engine now owns, in addition to those it had."""

    async def on_revoke(self, partitions: Sequence[TopicPartition]) -> None:
        """React to partitions that this engine gave up, after their work was drained and committed."""

    async def offload(self, function: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """Await a blocking call in a thread, `executor.offload_threads` at a time, so that the engine continues.

        The function must not use `self.cache`, which belongs to the event loop. A call that has begun is not
        interrupted by the engine's stop, and the process ends after it.

        Args:
            function: What to call.
            *args: Its arguments.
            **kwargs: Its keyword arguments.
        """
        run = self.__dict__.get("_offload") or asyncio.to_thread  # without an engine: on the driver, in a test
        return cast(ResultT, await run(function, *args, **kwargs))

    def deserialize_message(self, message: SourceMessage) -> Any:
        """Return the payload of a message that has a value; raising means that it cannot be parsed."""
        cls: Any = type(self)
        return _find_parser(cls)(message.value)

    def message_label(self, message: SourceMessage) -> str:
        """Name a message in logs and records."""
        return f"{message.topic}/{message.partition}/{message.offset}"

    async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
        """Turn a window of messages of one partition into tasks; a message without a task is done."""
        raise NotImplementedError(f"{type(self).__name__} has to define `async def arrange(self, messages, pending)`")

    async def transform(
        self, messages: Sequence[SourceMessage]
    ) -> Sequence[Payload | Sequence[Payload] | None] | CollectResult:
        """Return what to deliver for a window of messages of one partition, without any task; instead of `arrange`.

        A list has one place per message, in order; None means that there is nothing to deliver for it. A
        `CollectResult` concerns the whole window. If it raises, it is called again with parts of the window, until the
        message that causes it stands alone.

        Raises:
            SkipMessage: The only message is skipped.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define `async def transform(self, messages)`")

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
        """Return what to deliver for a task that succeeded."""
        return None

    async def on_message_complete(self, group: MessageGroup) -> CollectResult | None:
        """Return what to deliver for a message whose tasks are all terminal."""
        return None

    async def on_window_complete(
        self, results: Sequence[ExecutorResult | ExecutorError], messages: Sequence[SourceMessage]
    ) -> CollectResult | None:
        """Return what to deliver for a window whose messages are all complete."""
        return None

    async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction | list[ExecutorTask]:
        """Decide about a failed task; a list replaces it, an empty list completes it.

        RETRY (the default) runs it again with backoff up to `executor.max_retries` times and then means DLQ.
        """
        return ErrorAction.RETRY

    async def on_delivery_error(self, error: DeliveryError) -> DeliveryAction:
        """Decide about payloads that a sink refused."""
        return DeliveryAction.DLQ


def overrides(handler: Handler[Any, Any], hook: str) -> bool:
    """Tell whether the handler defines this hook itself, so that calling it can matter."""
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
    """Return the `InputT` that a handler class was declared with, None where it was left open."""
    for klass in cls.__mro__:
        for base in klass.__dict__.get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Handler):
                first = typing.get_args(base)[0]
                return None if isinstance(first, TypeVar) or first is Any else first
    return None
