"""What is refused before Spark starts: a handler whose hooks could not be called."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
import pytest
import structlog.testing

from tidemill.config.settings import Settings
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.preflight import StartUp, check_client_config, log, make_handler


class Good(Handler[str, str]):
    async def arrange(self, messages: Any, pending: Any) -> Any:
        return []


class NoArrange(Handler[str, str]):
    async def arange(self, messages: Any, pending: Any) -> Any:
        return []


class Synchronous(Handler[str, str]):
    def arrange(self, messages: Any, pending: Any) -> Any:  # type: ignore[override]
        return []


class TooFew(Handler[str, str]):
    async def arrange(self, messages: Any) -> Any:  # type: ignore[override]
        return []


class AsyncLabel(Good):
    async def message_label(self, message: Any) -> str:  # type: ignore[override]
        return ""


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (NoArrange, "NoArrange does not define arrange; .*is 'arange' a misspelling of arrange"),
        (Synchronous, "Synchronous.arrange must be an async def"),
        (TooFew, r"TooFew.arrange must accept \(self, messages, pending\)"),
        (AsyncLabel, "AsyncLabel.message_label must be a plain def"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused(handler: type[Handler[Any, Any]], expected: str) -> None:
    with pytest.raises(HandlerError, match=expected):
        make_handler(handler)


def test_a_method_with_nearly_the_name_of_a_hook_is_warned_of() -> None:
    class Misspelt(Good):
        async def on_task_completed(self, result: Any) -> None: ...

        async def on_parcel(self, parcel: Any) -> None: ...

    with structlog.testing.capture_logs() as logs:
        make_handler(Misspelt())

    assert [(line["method"], line["nearest_hook"]) for line in logs] == [("on_task_completed", "on_task_complete")]


def test_hooks_behind_decorators_are_taken() -> None:
    def plainly(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return hook(*args)

        return call

    def politely(hook: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(hook)(plainly(hook))

    class Decorated(Handler[str, str]):
        @plainly
        async def arrange(self, messages: Any, pending: Any) -> Any:
            return []

        @politely
        async def on_error(self, task: Any, error: Any) -> Any:
            return []

    assert isinstance(make_handler(Decorated), Decorated)


def test_an_on_startup_that_does_not_return_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Waiting(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[Any]:
            return []

        async def on_startup(self, config: Settings) -> None:
            while not told:
                await asyncio.sleep(0.01)

    told: list[Any] = []
    monkeypatch.setattr("tidemill.spark.preflight.STARTUP_SECONDS", 0.05)
    monkeypatch.setattr(log, "warning", lambda event, **details: told.append((event, details)), raising=False)
    StartUp(Waiting(), Settings()).run()
    ((event, details),) = told
    assert event == "a hook has not returned"
    assert details["hook"] == "Waiting.on_startup"


def test_the_clients_configuration_is_checked_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Consumer:
        def __init__(self, config: dict[str, Any], **_: Any) -> None:
            made.append(config)

        def close(self) -> None: ...

    monkeypatch.setattr(ck, "Consumer", Consumer)

    check_client_config(
        Settings.model_validate({"kafka": {"source_topic": "t", "client_config": {"fetch.min.bytes": 7}}})
    )

    [config] = made
    assert config["fetch.min.bytes"] == 7
    assert "bootstrap.servers" not in config  # else the client connects at once, and may log that nobody answers
