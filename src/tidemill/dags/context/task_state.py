"""Values of a task that survive its retries."""

from __future__ import annotations

from typing import Any

from tidemill.dags.attempt.task_services import TaskServices
from tidemill.runtime.json.codec import decode, encode


class TaskStateStore:
    """Values of a task that survive its retries, unlike XComs; `context["task_state_store"]`."""

    def __init__(self, services: TaskServices) -> None:
        self._services = services

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default` if there is none."""
        text = self._services.get_task_state(key)
        return default if text is None else decode(text)

    def set(self, key: str, value: Any) -> None:
        """Store a value under `key`.

        Raises:
            EncodingError: The value cannot be serialized.
        """
        self._services.set_task_state(key, encode(value, f"state {key!r}"))

    def delete(self, key: str) -> None:
        """Delete the value under `key`, if there is one."""
        self._services.delete_task_state(key)

    def clear(self) -> None:
        """Delete all values of this task."""
        self._services.clear_task_state()
