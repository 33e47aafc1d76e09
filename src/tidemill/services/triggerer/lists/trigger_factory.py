"""What a trigger is created from: its entry in the list, or what its own `serialize()` returned earlier."""

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
        serialized: Classpath and kwargs that an earlier run left, where they differ from those of the entry.
    """

    __slots__ = ("_serialized", "_spec")

    def __init__(self, spec: TriggerSpec, serialized: tuple[str, str] | None) -> None:
        """Create nothing yet."""
        self._spec = spec
        self._serialized = serialized

    def create(self) -> BaseTrigger:
        """Return a new trigger.

        Raises:
            TriggerError: It cannot be created as listed either.
        """
        spec = self._spec
        if self._serialized is not None:
            try:
                return create_trigger(spec.name, *self._serialized)
            except TriggerError as error:
                log.warning(
                    "a trigger cannot be created from what serialize() returned earlier; it starts over as listed",
                    trigger=spec.name,
                    error=str(error),
                )
                self._serialized = None
        return create_trigger(spec.name, spec.classpath, spec.kwargs)

    def remember(self, trigger: BaseTrigger) -> str | None:
        """Create the next one from what `serialize()` returns, if that differs from the list.

        Returns:
            What to keep of it, as JSON; None: nothing.
        """
        try:
            found = serialize_trigger(trigger)
        except TriggerError as error:
            log.warning(
                "what serialize() returned cannot be kept; a restart creates the trigger as it is listed",
                trigger=self._spec.name,
                error=str(error),
            )
            return None
        classpath, kwargs = found
        # The list's own kwargs are plain JSON, written differently.
        if classpath == self._spec.classpath and codec.decode(kwargs) == codec.decode(self._spec.kwargs):
            return None
        self._serialized = found
        return json.dumps(found)

    def forget(self) -> None:
        """Create the next one as it is listed."""
        self._serialized = None
