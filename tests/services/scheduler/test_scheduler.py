from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.until import until

from tidemill.core.errors import InvariantError, RemoteError
from tidemill.core.tasks.inputs import Channel
from tidemill.services.scheduler import scheduler
from tidemill.services.scheduler.scheduler import Scheduler
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import SchedulerAnswer, SchedulerTurn


class Store:
    """Answers turns by a script; then nothing is to be done."""

    def __init__(self, *script: Exception | SchedulerAnswer) -> None:
        self.script = list(script)
        self.turns: list[SchedulerTurn] = []

    async def call(self, request: Any) -> Any:
        self.turns.append(request)
        one = self.script.pop(0) if self.script else SchedulerAnswer(None, 0)
        if isinstance(one, Exception):
            raise one
        return one


class Bell:
    """Rings soon."""

    async def wait(self, channel: Channel, timeout_seconds: float) -> bool:
        await asyncio.sleep(0.001)
        return True


async def play(store: Store, enough: Callable[[], bool]) -> None:
    running = asyncio.create_task(Scheduler(store, Bell(), 7).run())
    try:
        await until(lambda: running.done() or enough())
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("error", [RemoteError("away"), InvariantError("a bug"), ValueError("another one")])
async def test_a_turn_that_fails_is_tried_again_whatever_the_error(error: Exception) -> None:
    store = Store(error, error)
    await play(store, lambda: len(store.turns) >= 4)


async def test_one_whose_service_was_ended_ends() -> None:
    with pytest.raises(CallRefusedError, match="ended"):
        await play(Store(CallRefusedError(RefusalKind.FENCED, "it was ended")), lambda: False)


async def test_what_cannot_be_worked_on_is_passed_over_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "AGAIN_SECONDS", 0.2)
    store = Store(SchedulerAnswer(None, 0, broken_runs=(3,), broken_dags=(5,)))

    await play(store, lambda: len(store.turns) > 2 and store.turns[-1].skip_runs == ())

    assert (store.turns[0].skip_runs, store.turns[0].skip_dags) == ((), ())
    assert (store.turns[1].skip_runs, store.turns[1].skip_dags) == ((3,), (5,))
    assert store.turns[-1].skip_dags == ()
