"""Commands whose store goes away under them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tidemill.cli.dags.asking import StoreAsker
from tidemill.core.errors import RemoteError
from tidemill.store.calls.task_calls import GetVariable, SetVariable
from tidemill.store.wire.remote import ConnectionLostError


class Dying:
    """A store whose process dies under the first call, until it is opened again."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    async def open(self) -> Any:
        self.opened += 1
        return self

    async def call(self, request: Any) -> Any:
        if self.opened == 1:
            raise ConnectionLostError("the connection to the store was lost")
        return "answer"

    async def close(self) -> None:
        self.closed += 1


def test_what_is_read_is_read_again_from_who_has_the_store_then() -> None:
    store = Dying()
    with asyncio.Runner() as runner:
        assert StoreAsker(runner, store.open).ask(GetVariable("k")) == "answer"
    assert (store.opened, store.closed) == (2, 1)


def test_a_change_is_not_repeated_and_the_user_is_told_to_look() -> None:
    store = Dying()
    with (
        asyncio.Runner() as runner,
        pytest.raises(RemoteError, match="was lost; the change may or may not have been made"),
    ):
        StoreAsker(runner, store.open).ask(SetVariable("k", "v"))
    assert store.opened == 1


class Held(Dying):
    """A store that tells whether it is open."""

    async def call(self, request: Any) -> Any:
        return self.opened - self.closed


@pytest.mark.parametrize(("is_file", "opened"), [(True, 2), (False, 1)])
def test_who_waits_lets_others_open_a_file_meanwhile(
    monkeypatch: pytest.MonkeyPatch, is_file: bool, opened: int
) -> None:
    store = Held()
    open_then = []
    monkeypatch.setattr(time, "sleep", lambda _: open_then.append(store.opened - store.closed))
    with asyncio.Runner() as runner:
        asker = StoreAsker(runner, store.open, is_file=is_file)
        asker.wait(0.5)
        assert asker.ask(GetVariable("k")) == 1
    assert open_then == [2 - opened]
    assert store.opened == opened
