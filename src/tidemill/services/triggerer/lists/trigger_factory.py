"""Creates a trigger from its entry in the list, or from the result of its earlier `serialize()`."""

from __future__ import annotations

import json

import structlog

from tidemill.runtime.json import codec
from tidemill.services.triggerer.hosting.loading import TriggerError, create_trigger, serialize_trigger
from tidemill.store.records import TriggerSpec
from tidemill.triggers.base import BaseTrigger

log = structlog.get_logger(__name__)


class TriggerFactory:
    """Creates one trigger, as often as it runs.

    Args:
        spec: Its entry in the list.
        serialized: Classpath and kwargs left by an earlier run, if they differ from the entry's.
    """

    __slots__ = ("_serialized", "_spec")

    def __init__(self, spec: TriggerSpec, serialized: tuple[str, str] | None) -> None:
        self._spec = spec
        self._serialized = serialized

    def create(self) -> BaseTrigger:
        """Return a new trigger.

        Raises:
            TriggerError: It cannot be created even as listed.
        """
        spec = self._spec
        if self._serialized is not None:
            try:
                return create_trigger(spec.name, *self._serialized)
            except TriggerError as error:
                log.warning(
                    "a trigger cannot be created from its earlier serialize(); it starts over as listed",
                    trigger=spec.name,
                    error=str(error),
                )
                self._serialized = None
        return create_trigger(spec.name, spec.classpath, spec.kwargs)

    def remember(self, trigger: BaseTrigger) -> str | None:
        """Create the next trigger from the result of `serialize()`, if that differs from the list.

        Returns:
            The result to store, as JSON; None: there is nothing to store.
        """
        try:
            found = serialize_trigger(trigger)
        except TriggerError as error:
            log.warning(
                "the result of serialize() cannot be stored; a restart creates the trigger as listed",
                trigger=self._spec.name,
                error=str(error),
            )
            return None
        classpath, kwargs = found
        # The list's kwargs are plain JSON, which may be written differently.
        if classpath == self._spec.classpath and codec.decode(kwargs) == codec.decode(self._spec.kwargs):
            return None
        self._serialized = found
        return json.dumps(found)

    def forget(self) -> None:
        """Create the next trigger as it is listed."""
        self._serialized = None
