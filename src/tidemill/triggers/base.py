"""The base classes of triggers: small asynchronous waiters that yield events and can be serialized and recreated.

The host of a trigger creates it from its classpath and keyword arguments, which `serialize` returns. Event triggers can
share one poll of their upstream: all triggers with equal `shared_stream_key` see the raw events of one stream, and each
derives its own events from them (`filter_shared_stream`).
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import structlog

from tidemill.config.redaction import redact
from tidemill.triggers.stream_api import SharedStreamProducer

_log = structlog.get_logger(__name__)


class TriggerEvent:
    """An event that a trigger fires.

    Events are equal if their payloads are. Triggers create them by the million, so this is a plain slotted class.

    Args:
        payload: The content of the event; any value that can be encoded as JSON.
        identity: A stable id of the event: an event with an identity is stored once per trigger, however often it is
            fired. None: every event counts as new.
    """

    __slots__ = ("identity", "payload")
    __hash__ = None  # type: ignore[assignment]  # a payload may be a dict

    def __init__(self, payload: Any = None, identity: str | None = None) -> None:
        self.payload = payload
        self.identity = identity

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TriggerEvent):
            return bool(self.payload == other.payload)
        return NotImplemented

    def __repr__(self) -> str:
        return f"TriggerEvent<{self.payload!r}>"


class BaseTaskEndEvent(TriggerEvent):
    """Base of the events that end the waiting task, without a worker.

    Args:
        xcoms: The values that the task stores for other tasks, by key; `return_value` is its result.
    """

    __slots__ = ("xcoms",)
    #: The state that the task ends in; also the payload of the event.
    state: ClassVar[str]

    def __init__(self, *, xcoms: Mapping[str, Any] | None = None) -> None:
        super().__init__(self.state)
        self.xcoms = xcoms


class TaskSuccessEvent(BaseTaskEndEvent):
    """Yield this event to end the waiting task as a success."""

    __slots__ = ()
    state = "success"


class TaskFailedEvent(BaseTaskEndEvent):
    """Yield this event to fail the try of the waiting task; its retries follow.

    Args:
        xcoms: See `BaseTaskEndEvent`.
        error: The reason, for people.
    """

    __slots__ = ("error",)
    state = "failed"

    def __init__(self, *, xcoms: Mapping[str, Any] | None = None, error: str = "") -> None:
        super().__init__(xcoms=xcoms)
        self.error = error


class TaskSkippedEvent(BaseTaskEndEvent):
    """Yield this event to skip the waiting task."""

    __slots__ = ()
    state = "skipped"


@dataclass(slots=True)
class StartTriggerArgs:
    """How a task starts in a trigger instead of a worker, with `start_from_trigger=True`.

    Attributes:
        trigger_cls: The import path of the trigger's class.
        next_method: The method of the operator that resumes the task with the trigger's event; None if the trigger
            ends the task itself, with a `TaskSuccessEvent`, `TaskFailedEvent` or `TaskSkippedEvent`.
        trigger_kwargs: The arguments of the trigger: values that can be stored. Texts are templates that see values of
            the run.
        next_kwargs: More arguments of the method.
        timeout: How long to wait for the trigger, as a timedelta or in seconds; None: no limit.
        feeds: Whether each event of the trigger becomes an element that the task gives to the tasks mapped over it,
            without a worker; the task ends with the trigger. `StreamOperator` sets it.
    """

    trigger_cls: str
    next_method: str | None
    trigger_kwargs: dict[str, Any] | None = None
    next_kwargs: dict[str, Any] | None = None
    timeout: timedelta | float | None = None
    feeds: bool = False


class BaseTrigger(abc.ABC):
    """Base of all triggers.

    Attributes:
        task_instance: The task that waits for the trigger, set by the host, with `dag_id`, `run_id`, `task_id`,
            `map_index` and `try_number`; None if no task waits.
        trigger_id: The stable id of the trigger, set by the host.
    """

    task_instance: Any = None
    trigger_id: Any = None
    #: The log of the waiting task, set by the host; it replaces the host's log.
    _task_log: Any = None

    def __init__(self, **kwargs: Any) -> None:
        """Accept and ignore any arguments, as Airflow's class does."""
        self.task_instance = None
        self.trigger_id = None

    @property
    def log(self) -> Any:
        """A structlog logger: the waiting task's logger, or else a logger bound to the trigger's class and id."""
        if self._task_log is not None:
            return self._task_log
        return _log.bind(trigger=type(self).__name__, trigger_id=self.trigger_id)

    @abc.abstractmethod
    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and the keyword arguments from which the trigger can be recreated elsewhere."""

    @abc.abstractmethod
    def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait and yield events, as an async generator that returns when there is nothing more to fire."""

    async def cleanup(self) -> None:
        """Release all resources; called whenever the trigger ends on this host, for any reason."""
        return

    async def on_kill(self) -> None:
        """Stop the external work that the trigger waits for; called only when a user cancelled the trigger."""
        return

    def __repr__(self) -> str:
        """Show the classpath and the arguments, with secrets masked."""
        classpath, kwargs = self.serialize()
        return f"<{classpath} {', '.join(f'{name}={value}' for name, value in redact(kwargs).items())}>"


class BaseEventTrigger(BaseTrigger):
    """Base of triggers that can share one poll of their upstream.

    Override `shared_stream_key` and `filter_shared_stream`, and one of two methods: `create_shared_stream_producer` for
    an upstream whose events are acknowledged, `open_shared_stream` for any other. The filter is the same for both.
    """

    def shared_stream_key(self) -> Hashable | None:
        """Return a key for the upstream; triggers with equal keys share one poll. None: share nothing."""
        return None

    def upstream_claim(self) -> str | None:
        """Return a name for an upstream that only one trigger list may read; None if any number may.

        The host does not start a list while another running list holds the same claim. For your own trigger over Kafka,
        return `tidemill.triggers.producers.kafka.kafka_claim(topic, group)`.
        """
        return None

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        """Poll the upstream for all subscribers: an async generator of raw events that never ends by itself.

        Args:
            kwargs: The arguments of the first subscriber, as its `serialize` returned them.
        """
        raise NotImplementedError(
            f"{cls.__name__} has a shared_stream_key; override open_shared_stream or create_shared_stream_producer"
        )

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """Create the producer, which polls the upstream and receives acknowledgements; do not connect yet.

        Args:
            kwargs: The arguments of the first subscriber, as its `serialize` returned them.
        """
        raise NotImplementedError(
            f"{cls.__name__} does not override create_shared_stream_producer: its stream is not acknowledged"
        )

    def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Derive events from raw events, as an async generator.

        Yield all events derived from one raw event before requesting the next one. Requesting the next raw event marks
        the current one as resolved once its derived events are stored.
        """
        raise NotImplementedError(f"{type(self).__name__} has a shared_stream_key; override filter_shared_stream")


def is_acknowledged(cls: type[object]) -> bool:
    """Return whether the shared stream of a trigger class is acknowledged, so that its events cannot come again."""
    if not issubclass(cls, BaseEventTrigger):
        return False
    found = cls.create_shared_stream_producer
    return getattr(found, "__func__", found) is not getattr(
        BaseEventTrigger.create_shared_stream_producer, "__func__", None
    )
