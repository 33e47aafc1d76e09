"""A trigger that ends its task."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tidemill.triggers import BaseTrigger, TaskFailedEvent, TaskSkippedEvent, TaskSuccessEvent, TriggerEvent


class Ends(BaseTrigger):
    """Ends its task in a state; with another state it fires `value`."""

    def __init__(self, state: str = "", value: Any = None, xcoms: Any = None) -> None:
        super().__init__()
        self.state, self.value, self.xcoms = state, value, xcoms

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"state": self.state, "value": self.value, "xcoms": self.xcoms}
        return f"{__name__}.Ends", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        match self.state:
            case "success":
                yield TaskSuccessEvent(xcoms=self.xcoms or {"return_value": self.value})
            case "failed":
                yield TaskFailedEvent(xcoms=self.xcoms, error=str(self.value))
            case "skipped":
                yield TaskSkippedEvent()
            case "unstorable":
                yield TaskSuccessEvent(xcoms={"key": object()})
            case _:
                yield TriggerEvent(self.value)


CLASSPATH = f"{__name__}.Ends"
