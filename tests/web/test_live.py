"""Live updates: computed once for all, and a slow client gets the newest state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from tests.web.scripted_pipeline import ScriptedPipeline
from tests.web.serving import log_in

from tidemill.web import live
from tidemill.web.live import LiveUpdates
from tidemill.web.pages import Pages
from tidemill.web.pipeline.section import PipelineView
from tidemill.web.pipeline.start import describe_about, open_archive
from tidemill.web.problems import RequestProblem


class Counted:
    """A view with two parts; counts how often it is computed."""

    def __init__(self) -> None:
        self.parts = {"a": "1", "b": "1"}
        self.computed = 0

    def __call__(self) -> dict[str, str]:
        self.computed += 1
        return dict(self.parts)


async def test_an_update_is_computed_once_for_all_and_not_at_all_for_none() -> None:
    view = Counted()
    updates = LiveUpdates({"page": view})
    updates.update()
    assert view.computed == 0
    clients = [await updates.listen("page") for _ in range(3)]
    first = [[await anext(client), await anext(client)] for client in clients]
    assert all(events == [{"event": "a", "data": "1"}, {"event": "b", "data": "1"}] for events in first)
    before = view.computed
    view.parts["b"] = "2"
    updates.update()
    assert view.computed == before + 1
    assert [await anext(client) for client in clients] == [{"event": "b", "data": "2"}] * 3


async def test_a_stream_ends_with_the_login_of_its_client() -> None:
    view = Counted()
    updates = LiveUpdates({"page": view})
    known = {"ann", "rob"}
    streams = {name: await updates.listen("page", lambda name=name: name in known) for name in ("ann", "rob")}
    for stream in streams.values():
        assert [(await anext(stream))["event"], (await anext(stream))["event"]] == ["a", "b"]
    waiting = asyncio.ensure_future(anext(streams["ann"], None))
    await asyncio.sleep(0)
    known.remove("ann")
    updates.update()

    assert await waiting is None
    view.parts["a"] = "2"
    updates.update()
    assert await anext(streams["rob"]) == {"event": "a", "data": "2"}
    assert updates.clients == 1


async def test_the_live_stream_asks_for_the_session_of_its_request() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        seen = []

        async def listen(view: str, is_known: Callable[[], bool]) -> AsyncIterator[dict[str, str]]:
            seen.append(is_known())
            await client.post("/logout")
            seen.append(is_known())
            raise RequestProblem(503, "enough")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LiveUpdates, "listen", lambda self, *given: listen(*given))
            assert (await client.get("/api/v1/live")).status_code == 503
    assert seen == [True, False]


async def test_a_slow_client_gets_the_newest_state_and_is_told_what_it_missed() -> None:
    view = Counted()
    updates = LiveUpdates({"page": view})
    client = await updates.listen("page")
    await anext(client)
    await anext(client)
    for number in (2, 3, 4):
        view.parts["a"] = str(number)
        updates.update()

    missed = await anext(client)
    assert (missed["event"], json.loads(missed["data"])) == ("missed", {"updates": 2})
    assert await anext(client) == {"event": "a", "data": "4"}


async def test_a_part_that_changes_back_reaches_a_client_that_came_in_between() -> None:
    view = Counted()
    updates = LiveUpdates({"page": view})
    early = await updates.listen("page")
    await anext(early)
    view.parts["a"] = "2"
    late = await updates.listen("page")
    seen = [await anext(late), await anext(late)]
    view.parts["a"] = "1"
    updates.update()
    if seen[0]["data"] != "1":
        seen.append(await asyncio.wait_for(anext(late), 30))
    assert [event["data"] for event in seen if event["event"] == "a"][-1] == "1"


async def test_a_client_that_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_CLIENTS", 1)
    updates = LiveUpdates({"page": Counted()})
    client = await updates.listen("page")
    await anext(client)
    with pytest.raises(RequestProblem, match="1 clients already follow"):
        await updates.listen("page")
    await client.aclose()  # type: ignore[attr-defined]
    assert updates.clients == 0
    await updates.listen("page")


async def test_the_overview_sends_only_parts_that_changed() -> None:
    pipeline = ScriptedPipeline()
    watched = pipeline.watched()
    view = PipelineView(watched, Pages(describe_about(watched)), open_archive(watched))
    view.sample()
    client = await view.live.listen("page")
    first = {event["event"] for event in [await anext(client) for _ in range(8)]}
    assert first == {"head", "tiles", "engines", "partitions", "sinks", "slowest", "hooks", "point"}
    pipeline.orphans = [7]
    view.sample()
    view.live.update()
    changed = [await anext(client)]
    while changed[-1]["event"] != "point":
        changed.append(await anext(client))
    assert "head" in {event["event"] for event in changed}
    assert not {"slowest", "hooks", "partitions"} & {event["event"] for event in changed}
    assert "partition 7 of orders" in changed[0]["data"]
