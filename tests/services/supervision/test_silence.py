"""A service that has its process, but does not beat any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tidemill.services.supervision.silence import wait_until_silent
from tidemill.store.calls.service_calls import BeatSession, BeginSession
from tidemill.store.engines.sqlite import open_sqlite


async def test_a_service_that_does_not_beat_any_more_is_silent_and_one_that_does_is_not(tmp_path: Any) -> None:
    store = await open_sqlite(tmp_path / "store.db")
    try:
        beats, hangs = [
            await store.call(BeginSession("triggerer", name, "here", "boot", 1)) for name in ("beats", "hangs")
        ]
        looks = 0

        class Beating:
            """Lets one service beat before each look."""

            async def call(self, call: Any) -> Any:
                nonlocal looks
                looks += 1
                await store.call(BeatSession(beats))
                return await store.call(call)

        caller = cast("Any", Beating())
        lively = asyncio.create_task(wait_until_silent(caller, lambda one: one.id == beats, 0.2, 0.01))
        gone = asyncio.create_task(wait_until_silent(caller, lambda one: one.id == 0, 0.2, 0.01))
        async with asyncio.timeout(30):
            await wait_until_silent(caller, lambda one: one.id == hangs, 0.3, 0.01)
        assert looks > 10
        assert not lively.done()
        assert not gone.done()
        lively.cancel()
        gone.cancel()
        await asyncio.wait({lively, gone})
    finally:
        await store.close()


async def test_a_process_that_does_not_begin_its_service_is_silent_and_no_process_is_not(tmp_path: Any) -> None:
    store = await open_sqlite(tmp_path / "store.db")
    try:
        none = asyncio.create_task(
            wait_until_silent(store, lambda one: False, 60, 0.01, find_process=lambda: None, start_seconds=0.05)
        )
        async with asyncio.timeout(30):
            await wait_until_silent(store, lambda one: False, 60, 0.01, find_process=lambda: 17, start_seconds=0.3)
        assert not none.done()
        none.cancel()
        await asyncio.wait({none})
    finally:
        await store.close()
