"""Variables and connections for a running trigger of a task, through the store's calls.

Invariant: the event loop, which all triggers share, never waits for an answer; a trigger must ask on a thread of its
own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.errors import HandlerError, RemoteError
from tidemill.dags.attempt.task_services import NO_WRITES, BatchWrites
from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.call import Call
from tidemill.store.calls.task_calls import DeleteVariable, GetConnection, GetVariable, SetVariable
from tidemill.store.database import StoreCalls

A = TypeVar("A")

#: How long an answer may take.
ANSWER_SECONDS = 30.0


class TriggerServices:
    """The part of `tidemill.dags.attempt.task_services.TaskServices` that triggers may use.

    Args:
        calls: The store; called on the running loop.
        secrets: Passwords of connections and secret variables are added, so that they are masked.
    """

    def __init__(self, calls: StoreCalls, secrets: KnownSecrets) -> None:
        self._secrets = secrets
        self._calls = calls
        self._loop = asyncio.get_running_loop()

    def get_variable(self, key: str) -> str | None:
        """Return the value of a variable; None: it does not exist."""
        return self._ask(GetVariable(key), f"Variable.get, {key!r}")

    def set_variable(self, key: str, value: str, description: str | None = None) -> None:
        self._ask(SetVariable(key, value, description), f"Variable.set, {key!r}, VALUE")

    def delete_variable(self, key: str) -> bool:
        """Delete a variable; return whether it existed."""
        return self._ask(DeleteVariable(key), f"Variable.delete, {key!r}")

    def get_connection(self, conn_id: str) -> str | None:
        """Return a connection, as JSON of the fields of `tidemill.dags.Connection`; None: it does not exist."""
        found = self._ask(GetConnection(conn_id), f"Connection.get, {conn_id!r}")
        if found is None:
            return None
        fields = {name: getattr(found, name) for name in ("host", "schema", "login", "password", "port", "extra")}
        return json.dumps({"conn_type": found.kind, "description": found.description} | fields)

    def get_xcom(
        self,
        task_ids: tuple[str, ...],
        key: str,
        map_index: int = -1,
        include_prior: bool = False,
        dag_id: str | None = None,
        run_id: str | None = None,
    ) -> tuple[str | None, ...]:
        """Refuse: a trigger gets its inputs as arguments."""
        _refuse("XComs")

    def get_page(
        self,
        task_id: str,
        key: str,
        *,
        after: int = -1,
        offset: int = 0,
        limit: int = 1_000,
        dag_id: str | None = None,
        run_id: str | None = None,
        count: bool = False,
        map_index: int | None = None,
    ) -> NoReturn:
        """Refuse: a trigger gets its inputs as arguments."""
        _refuse("XComs")

    def emit(self, first: int, values: tuple[str, ...]) -> NoReturn:
        """Refuse: a trigger returns its results in its event."""
        _refuse("XComs")

    def store_list(self, key: str, first: int, values: tuple[str, ...], total: int) -> NoReturn:
        """Refuse: a trigger returns its results in its event."""
        _refuse("XComs")

    def wait_for_place(self, is_over: Callable[[], bool]) -> NoReturn:
        """Refuse: a trigger returns its results in its event."""
        _refuse("XComs")

    def take_events(self, trigger: int, after: int, limit: int, wait_seconds: float) -> NoReturn:
        """Refuse: only attempts handle streams."""
        _refuse("streams")

    def keep_batch(
        self,
        trigger: int,
        handled: int,
        number: int,
        emitted: tuple[tuple[str, str | None], ...] = (),
        checkpoint: str | None = None,
        *,
        stops: bool = False,
        lists: bool = False,
        current: int | None = None,
        final: bool = False,
        writes: BatchWrites = NO_WRITES,
    ) -> NoReturn:
        """Refuse: only attempts handle streams."""
        _refuse("streams")

    def get_earlier_run(self, state: str | None) -> None:
        """Refuse: a trigger gets its inputs as arguments."""
        _refuse("other runs")

    def get_run(self, dag_id: str, run_id: str) -> None:
        """Refuse: a trigger gets its inputs as arguments."""
        _refuse("other runs")

    def get_chunk_items(self, after: int, limit: int = 1_000, part: int | None = None) -> NoReturn:
        """Refuse: only attempts have elements."""
        _refuse("the elements of its task")

    def get_parts(self, after: int, limit: int) -> NoReturn:
        """Refuse: only attempts have elements."""
        _refuse("the elements of its task")

    def keep_parts(self, results: object, seen: int, running: int) -> NoReturn:
        """Refuse: only attempts have elements."""
        _refuse("the elements of its task")

    def wait_for_elements(self, is_over: object) -> NoReturn:
        """Refuse: only attempts have elements."""
        _refuse("the elements of its task")

    def push_xcom(self, key: str, value: str) -> None:
        """Refuse: a trigger returns its results in its event."""
        _refuse("XComs")

    def get_task_state(self, key: str) -> str | None:
        """Refuse: only attempts keep state."""
        _refuse("the state of its task")

    def set_task_state(self, key: str, value: str) -> None:
        """Refuse: only attempts keep state."""
        _refuse("the state of its task")

    def delete_task_state(self, key: str) -> None:
        """Refuse: only attempts keep state."""
        _refuse("the state of its task")

    def clear_task_state(self) -> None:
        """Refuse: only attempts keep state."""
        _refuse("the state of its task")

    def _ask(self, request: Call[A], what: str) -> A:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise HandlerError(
                "a trigger must not block the event loop, which other triggers need, to wait for the store; "
                f"use `await asyncio.to_thread({what})`"
            )
        try:
            return asyncio.run_coroutine_threadsafe(self._call(request), self._loop).result(ANSWER_SECONDS)
        except TimeoutError:
            raise RemoteError(f"the store has not answered within {ANSWER_SECONDS:g} s") from None

    async def _call(self, request: Call[A]) -> A:
        answer = await self._calls.call(request)
        self._secrets.add(find_secrets(request, answer))
        return answer


def _refuse(what: str) -> NoReturn:
    raise HandlerError(
        f"a trigger cannot use {what}; pass its inputs as arguments, and return its results in its event"
    )
