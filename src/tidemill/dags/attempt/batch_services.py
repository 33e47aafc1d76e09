"""The writes of a stream's handler: they are stored with its batch, in one transaction, or not at all.

Invariants: XComs and task state that a handler has written are read as if they were stored. Once the stream has ended,
or the attempt handles no more of it, writes go to the store at once.
"""

from __future__ import annotations

from typing import Any, Final

from tidemill.dags.attempt.task_services import BatchWrites, TaskServices, XComQuery
from tidemill.dags.exceptions import TaskFailed

#: The limit of the values of a batch, which are sent to the worker in one message with its elements.
_MAX_BYTES: Final = 16 << 20


class BatchServices:
    """The services of an attempt that handles a stream; a `TaskServices`.

    Args:
        services: The store.
        task_id: The task.
        map_index: Its map index.
    """

    def __init__(self, services: TaskServices, task_id: str, map_index: int) -> None:
        self._services, self._own = services, (task_id, map_index)
        self._xcoms: dict[str, str] = {}
        self._states: dict[str, str | None] = {}
        self._clears = False
        self._holds = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)

    @property
    def has_writes(self) -> bool:
        """Whether something was written since the last call of `take`."""
        return bool(self._xcoms or self._states or self._clears)

    def take(self) -> BatchWrites:
        """Return what was written since the last call."""
        writes = BatchWrites(tuple(self._xcoms.items()), tuple(self._states.items()), self._clears)
        self._xcoms, self._states, self._clears = {}, {}, False
        return writes

    def release(self) -> None:
        """Forget what is not stored, and send later writes to the store at once."""
        self.take()
        self._holds = False

    def push_xcom(self, key: str, value: str) -> None:
        if self._holds:
            self._xcoms[key] = value
            self._check_size()
        else:
            self._services.push_xcom(key, value)

    def get_xcom(self, query: XComQuery) -> tuple[str | None, ...]:
        """Return the values that tasks pushed under a key, with those of this batch."""
        found = self._services.get_xcom(query)
        if query.key not in self._xcoms or query.dag_id is not None or query.run_id is not None:
            return found
        own, mine = self._own, self._xcoms[query.key]
        return tuple(
            mine if (task_id, query.map_index) == own else value
            for task_id, value in zip(query.task_ids, found, strict=True)
        )

    def get_task_state(self, key: str) -> str | None:
        if key in self._states:
            return self._states[key]
        return None if self._clears else self._services.get_task_state(key)

    def set_task_state(self, key: str, value: str) -> None:
        if self._holds:
            self._states[key] = value
            self._check_size()
        else:
            self._services.set_task_state(key, value)

    def delete_task_state(self, key: str) -> None:
        if self._holds:
            self._states[key] = None
        else:
            self._services.delete_task_state(key)

    def clear_task_state(self) -> None:
        if self._holds:
            self._states, self._clears = {}, True
        else:
            self._services.clear_task_state()

    def _check_size(self) -> None:
        size = sum(len(value) for value in (*self._xcoms.values(), *self._states.values()) if value is not None)
        if size > _MAX_BYTES:
            raise TaskFailed(
                f"the XComs and the task state of a batch have more than {_MAX_BYTES:,} bytes; set a smaller "
                "stream_max_events, or store references"
            )
