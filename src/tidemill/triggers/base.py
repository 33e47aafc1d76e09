"""What a trigger is: a small asynchronous waiter that yields events, and can be serialized and created again.

A trigger is created from its classpath and keyword arguments on the host where it waits; `serialize` returns them.
Event triggers can share one poll of their upstream: those with an equal `shared_stream_key` all see the raw events of
one stream, and each derives its own events from them (`filter_shared_stream`).
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Hashable
from typing import Any

import structlog

from tidemill.config.redaction import redact
from tidemill.triggers.stream_api import SharedStreamProducer

_log = structlog.get_logger(__name__)


class TriggerEvent:
    """Something that a trigger fires.

    Events are equal if their payloads are. They are created by the million, so this is a plain slotted class.

    Args:
        payload: What happened; anything that can be encoded as JSON.
        identity: Identifies the event when it is fired again: an event with an identity is stored once per
            trigger. None: every event is a new one.
    """

    __slots__ = ("identity", "payload")
    __hash__ = None  # type: ignore[assignment]  # a payload may be a dict

    def __init__(self, payload: Any = None, identity: str | None = None) -> None:
        """Keep both as they are."""
        self.payload = payload
        self.identity = identity

    def __eq__(self, other: object) -> bool:
        """Compare payloads."""
        if isinstance(other, TriggerEvent):
            return bool(self.payload == other.payload)
        return NotImplemented

    def __repr__(self) -> str:
        """Show the payload."""
        return f"TriggerEvent<{self.payload!r}>"


class BaseTrigger(abc.ABC):
    """Base of all triggers.

    Attributes:
        task_instance: The task that waits for it, set by the host, with `dag_id`, `run_id`, `task_id`, `map_index`
            and `try_number`; None if there is none.
        trigger_id: Its stable id, set by the host.
    """

    task_instance: Any = None
    trigger_id: Any = None
    #: Where its lines go instead of the log of its host, set by the host.
    _task_log: Any = None

    def __init__(self, **kwargs: Any) -> None:
        """Keep nothing; a trigger keeps what it needs under its own names."""
        self.task_instance = None
        self.trigger_id = None

    @property
    def log(self) -> Any:
        """A structlog logger: that of its task, else one that is bound to the class and id of the trigger."""
        if self._task_log is not None:
            return self._task_log
        return _log.bind(trigger=type(self).__name__, trigger_id=self.trigger_id)

    @abc.abstractmethod
    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and the keyword arguments from which this trigger can be created elsewhere."""

    @abc.abstractmethod
    def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait and yield events, as an async generator that returns when it has nothing more to fire."""

    async def cleanup(self) -> None:
        """Release what the trigger holds; called whenever it ends on this host, for whatever reason."""
        return

    async def on_kill(self) -> None:
        """End the external work that the trigger waits for; called only when a user cancelled it."""
        return

    def __repr__(self) -> str:
        """Show its classpath and arguments, secrets masked."""
        classpath, kwargs = self.serialize()
        return f"<{classpath} {', '.join(f'{name}={value}' for name, value in redact(kwargs).items())}>"


class BaseEventTrigger(BaseTrigger):
    """Base of the triggers that can share one poll of their upstream.

    Override `shared_stream_key` and `filter_shared_stream`, and either `open_shared_stream` or, for an upstream that
    is acknowledged, `create_shared_stream_producer`. The filter is the same for both.
    """

    def shared_stream_key(self) -> Hashable | None:
        """Return a key for the upstream: triggers with equal keys share one poll. None: share nothing."""
        return None

    def upstream_claim(self) -> str | None:
        """Return a name for the upstream if only one list of triggers may read it; None: any list may.

        The host does not start a list while another running list has the same claim. For a trigger of your own
        over Kafka, return `tidemill.triggers.producers.kafka.kafka_claim(topic, group)`.
        """
        return None

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        """Poll the upstream for all subscribers: an async generator of raw events that never ends by itself.

        Args:
            kwargs: What the first subscriber's `serialize` returned.
        """
        raise NotImplementedError(
            f"{cls.__name__} has a shared_stream_key, so it must override open_shared_stream or "
            f"create_shared_stream_producer"
        )

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Create the producer that polls the upstream and is told what was dealt with; do not connect yet.

        Args:
            kwargs: What the first subscriber's `serialize` returned.
        """
        raise NotImplementedError(
            f"{cls.__name__} does not override create_shared_stream_producer: its stream is not acknowledged"
        )

    def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Derive events from raw events, as an async generator.

        Yield everything derived from one raw event before requesting the next: requesting it means that this one is
        dealt with, once what was derived from it is stored.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has a shared_stream_key, so it must override filter_shared_stream"
        )
