"""Variables and connections for a running trigger of a task, through the store's calls.

Invariant: the event loop, which all triggers share, never waits for an answer; a trigger must ask on a thread of its
own.
"""

from __future__ import annotations

import asyncio
import json
from typing import TypeVar

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.errors import HandlerError, RemoteError
from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.call import Call
from tidemill.store.calls.task_calls import DeleteVariable, GetConnection, GetVariable, SetVariable
from tidemill.store.database import StoreCalls

A = TypeVar("A")

#: How long an answer may take.
ANSWER_SECONDS = 30.0


class TriggerServices:
    """The variables and connections for triggers; a `dags.attempt.task_services.SharedValues`.

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
