"""What triggers of tasks can ask for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.errors import HandlerError
from tidemill.services.triggerer.tasks.trigger_services import TriggerServices
from tidemill.store.calls.task_calls import ConnectionRecord, DeleteVariable, GetConnection, GetVariable, SetVariable


class Settings:
    """Variables and connections in memory."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}

    async def call(self, request: Any) -> Any:
        match request:
            case GetVariable(key=key):
                return self.variables.get(key)
            case SetVariable(key=key, value=value):
                self.variables[key] = value
                return None
            case DeleteVariable(key=key):
                return self.variables.pop(key, None) is not None
            case GetConnection(id="db"):
                return ConnectionRecord("db", "postgres", host="there", password="p@ss", port=5432, extra='{"a": 1}')
            case GetConnection():
                return None
        raise AssertionError(request)


async def test_a_thread_of_a_trigger_reads_and_sets_variables():
    services = TriggerServices(Settings(), KnownSecrets())

    assert await asyncio.to_thread(services.get_variable, "a") is None
    await asyncio.to_thread(services.set_variable, "a", "1")
    assert await asyncio.to_thread(services.get_variable, "a") == "1"
    assert await asyncio.to_thread(services.delete_variable, "a")


async def test_a_connection_is_what_the_dags_read_and_its_password_is_kept_out_of_logs():
    secrets = KnownSecrets()
    services = TriggerServices(Settings(), secrets)

    found = json.loads(await asyncio.to_thread(services.get_connection, "db") or "")

    assert (found["conn_type"], found["host"], found["port"], found["extra"]) == ("postgres", "there", 5432, '{"a": 1}')
    assert secrets.mask("it is p@ss") == "it is ***"
    assert await asyncio.to_thread(services.get_connection, "none") is None


async def test_the_event_loop_does_not_wait_for_the_store_and_the_message_says_what_to_do():
    services = TriggerServices(Settings(), KnownSecrets())

    with pytest.raises(HandlerError, match=r"await asyncio\.to_thread\(Variable\.get, 'a'\)"):
        services.get_variable("a")
