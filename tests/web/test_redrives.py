"""Dead letters are sent again from the web UI: counted first, confirmed, once, with the command line's cursor."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.deadletters.redrive.test_folder import Place, delivery
from tests.letters import write
from tests.until import slack, until, wait_until
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import connect, log_in
from tests.web.test_access import TOKEN, with_accounts

from tidemill.core.deadletters.redrive import LetterCriteria, Target
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.web.letters import letter_box, redrive_desk
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.redrive_desk import RedriveDesk, RedriveState
from tidemill.web.letters.section import build_letters_section
from tidemill.web.pages import Pages
from tidemill.web.pipeline.section import PipelineView
from tidemill.web.problems import RequestProblem
from tidemill.web.sections import PageAbout
from tidemill.web.workers import WithWorkers, Workers

SINK = RedriveOrder(target=Target.SINK)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def pipeline(place: Place) -> ScriptedPipeline:
    pipeline = ScriptedPipeline()
    pipeline.settings = place.settings
    return pipeline


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(PipelineView, "note_action", lambda self, action, by: found.append((action, by)))
    return found


@pytest.fixture
def desk(place: Place) -> Iterator[RedriveDesk]:
    desk = RedriveDesk(place.settings, lambda action, by: None)
    yield desk
    desk.close()


def finish(desk: RedriveDesk, begun: RedriveState) -> RedriveState:
    return wait_until(lambda: None if (now := desk.find(begun.redrive_id)).is_running else now)


async def ended(client: httpx.AsyncClient, redrive_id: str) -> dict[str, Any]:
    while (report := (await client.get(f"/api/v1/redrives/{redrive_id}")).json())["ended_at"] is None:
        await until(lambda: True)
    return dict(report)


async def test_a_letter_that_was_sent_again_says_so_and_its_command_reaches_it(
    place: Place, pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_box, "HISTORY_SECONDS", 0.0)
    write(place.letters, [delivery(number, letter_id=f"l-{number}") for number in (0, 1)])
    async with log_in(pipeline) as client:
        before = (await client.get("/api/v1/letters/l-0")).json()
        await asyncio.to_thread(place.redrive, criteria=LetterCriteria(ids=("l-0",)))
        after = (await client.get("/api/v1/letters/l-0")).json()
        rows = (await client.get("/api/v1/letters")).json()["rows"]
        page, pages = (await client.get("/letters/l-0")).text, (await client.get("/letters")).text
        form = (await client.get("/redrives?letter=l-0&restart=true")).text

    assert (before["redriven"], before["commands"]["deliver again"].count("--restart")) == ([], 0)
    assert [each["to"] for each in after["redriven"]] == ["sink"]
    assert after["commands"]["deliver again"] == "tidemill dlq redrive --id l-0 --restart --to sink"
    assert {row["letter_id"]: len(row["redriven"]) for row in rows} == {"l-0": 1, "l-1": 0}
    assert "tidemill dlq redrive --id l-0 --restart" in page
    assert "letter=l-0&restart=true" in html.unescape(page)
    assert pages.count(">redriven ") == 1
    assert 'name="restart" checked' in form


async def test_what_a_dry_run_has_counted_is_sent_once_it_is_confirmed(
    place: Place, pipeline: ScriptedPipeline, noted: list[tuple[str, str]]
) -> None:
    place.write(range(20))
    async with log_in(pipeline) as client:
        begun = await client.post("/api/v1/redrives", json={"to": "sink", "sinks": ["filesystem.out"]})
        dry = await ended(client, begun.json()["redrive_id"])
        assert (begun.status_code, dry["dry_run"], dry["letters"], dry["messages"]) == (202, True, 20, 20)
        assert dry["destinations"] == [{"what": "sinks.filesystem.out", "letters": 20}]
        assert (dry["read"], dry["total"], dry["ended"], dry["filters"]) == (
            20,
            20,
            "end",
            {"sinks": ["filesystem.out"]},
        )
        assert (place.out.exists(), noted) == (False, [])

        place.write(range(20, 25), run="r2")
        sent = await client.post(f"/api/v1/redrives/{dry['redrive_id']}/send", json={"letters": 20})
        assert sent.json() == {"text": "Redrive 2 has started."}
        (now, _) = (await client.get("/api/v1/redrives")).json()["here"]
        done = await ended(client, now["redrive_id"])
        assert (done["dry_run"], done["letters"], done["failed"], done["error"]) == (False, 20, [], "")
        assert place.sent() == dict.fromkeys(range(20), 1), "what was written after the dry run is left"

        again = (await client.post("/api/v1/redrives", json={"to": "sink", "sinks": ["filesystem.out"]})).json()
        rest = await ended(client, again["redrive_id"])
        past = (await client.get("/api/v1/redrives")).json()["past"]

    assert (rest["letters"], rest["resumed"]) == (5, True)
    order = RedriveOrder(target=Target.SINK, criteria=LetterCriteria(sinks=("filesystem.out",)))
    tally = await asyncio.to_thread(Redrive(place.settings, order).run)
    assert tally.sent == 5, "the command line goes on with the same cursor"
    assert [(each["to"], each["records"], each["unsent"]) for each in past] == [("sink", 20, 0)]
    assert noted == [
        ("redrive 2: 20 letters to sink", "key"),
        ("redrive 2 ended (limit): 20 letters sent", "key"),
    ]


async def test_only_what_was_counted_can_be_confirmed(place: Place, pipeline: ScriptedPipeline) -> None:
    place.write(range(4))
    async with log_in(pipeline) as client:
        dry = await ended(client, (await client.post("/api/v1/redrives", json={"to": "sink"})).json()["redrive_id"])
        where = f"/api/v1/redrives/{dry['redrive_id']}/send"
        wrong = await client.post(where, json={"letters": 5})
        without = await client.post(where, json={})
        other = await client.post("/api/v1/redrives/guessed/send", json={"letters": 4})
        await client.post(where, json={"letters": 4})
        (real, _) = (await client.get("/api/v1/redrives")).json()["here"]
        await ended(client, real["redrive_id"])
        twice = await client.post(f"/api/v1/redrives/{real['redrive_id']}/send", json={"letters": 4})
    assert [answer.status_code for answer in (wrong, without, other, twice)] == [409, 422, 404, 409]
    assert wrong.json()["detail"].startswith("the dry run counted 4 letters, not 5")
    assert place.sent() == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kinds": ["nothing"]}, "kinds: expected some of"),
        ({"since": "2h"}, "since: a redrive needs an absolute time"),
        ({"until": "soon"}, "until"),
        ({"since": "2026-05-02", "until": "2026-05-01"}, "until must be later than since"),
        ({"to": "no topic"}, "to: the name"),
        ({"to": "topic:../x"}, "to: the name"),
        ({"to": ""}, "to"),
        ({"rate": 0}, "rate"),
        ({"limit": 0}, "limit"),
        ({"ids": [""]}, "ids"),
        ({"text": "\ud800"}, "text"),
        ({"ids": ["\ud800"]}, "ids"),
        ({"rate": 1e400}, "rate"),
        ({"ids": ["x"] * 101}, "ids"),
        ({"dry_run": False}, "dry_run"),
        ([], "the request"),
    ],
)
async def test_a_wrong_order_is_refused(pipeline: ScriptedPipeline, body: Any, said: str) -> None:
    async with log_in(pipeline) as client:
        content = json.dumps(body).encode()
        answer = await client.post("/api/v1/redrives", content=content, headers={"Content-Type": "application/json"})
        listed = (await client.get("/redrives")).text
    assert (answer.status_code, answer.json()["detail"].startswith(said)) == (422, True), answer.text
    assert "Dry run to" not in listed


async def test_who_may_only_read_sees_redrives_and_begins_none(place: Place) -> None:
    pipeline = with_accounts()
    pipeline.settings.dlq.path = str(place.letters)
    async with connect(pipeline) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert (await client.get("/api/v1/redrives")).json() == {"here": [], "past": []}
        for path in ("", "/x/send", "/stop"):
            answer = await client.post(f"/api/v1/redrives{path}", json={"to": "sink"})
            assert (answer.status_code, "role operate" in answer.json()["detail"]) == (403, True)


def test_one_redrive_runs_at_a_time_and_can_be_stopped_and_continued(place: Place, desk: RedriveDesk) -> None:
    place.write(range(40))
    dry = finish(desk, desk.count(SINK, "ann"))
    slow = RedriveOrder(target=Target.SINK, rate=2.0)
    counted = finish(desk, desk.count(slow, "ann"))
    assert counted.letters == dry.letters == 40
    running = desk.send(counted.redrive_id, 40, "ann")
    for begin in (lambda: desk.count(SINK, "rob"), lambda: desk.send(dry.redrive_id, 40, "rob")):
        with pytest.raises(RequestProblem, match=r"a redrive .* is running \(started by ann\)") as caught:
            begin()
        assert caught.value.status == 409
    wait_until(lambda: desk.find(running.redrive_id).letters >= 2)
    desk.stop("rob")
    last = finish(desk, running)
    assert (last.ended, last.error) == ("stopped", "")
    assert 2 <= last.letters < 40
    assert place.sent() == dict.fromkeys(range(last.letters), 1)
    with pytest.raises(RequestProblem, match="no redrive is running"):
        desk.stop("rob")
    rest = finish(desk, desk.count(SINK, "ann"))
    assert (rest.letters, rest.resumed) == (40 - last.letters, True)
    assert finish(desk, desk.send(rest.redrive_id, rest.letters, "ann")).ended in ("end", "limit")
    assert place.sent() == dict.fromkeys(range(40), 1)


def test_the_end_of_the_process_stops_a_redrive_and_keeps_its_cursor(place: Place) -> None:
    place.write(range(40))
    desk = RedriveDesk(place.settings, lambda action, by: None)
    counted = finish(desk, desk.count(RedriveOrder(target=Target.SINK, rate=2.0), "ann"))
    running = desk.send(counted.redrive_id, 40, "ann")
    wait_until(lambda: desk.find(running.redrive_id).letters >= 1)
    began = time.monotonic()
    desk.close()
    assert time.monotonic() - began < slack(10)
    with pytest.raises(RequestProblem, match="the pipeline is shutting down"):
        wait_until(lambda: not desk.find(running.redrive_id).is_running)
        desk.count(SINK, "ann")
    sent = desk.find(running.redrive_id).letters
    assert Redrive(place.settings, SINK).run().sent == 40 - sent
    assert place.sent() == dict.fromkeys(range(40), 1)


def test_another_process_with_the_same_redrive_is_said(place: Place, desk: RedriveDesk) -> None:
    place.write(range(4))
    dry = finish(desk, desk.count(SINK, "ann"))
    inside, go_on = threading.Event(), threading.Event()

    def hold(redrive: Redrive) -> None:
        inside.set()
        go_on.wait(60)

    other = threading.Thread(target=Redrive(place.settings, SINK, watch=hold).run)
    other.start()
    assert inside.wait(60)
    failed = finish(desk, desk.send(dry.redrive_id, 4, "ann"))
    go_on.set()
    other.join(60)
    assert (failed.ended, failed.letters) == ("error", 0)
    assert "same redrive" in failed.error
    assert place.sent() == dict.fromkeys(range(4), 1)


def test_what_cannot_be_sent_is_named_and_not_counted_as_sent(place: Place, desk: RedriveDesk) -> None:
    place.write(range(3))
    place.write(range(3, 5), run="r2", sink_name="gone")
    dry = finish(desk, desk.count(SINK, "ann"))
    assert (dry.letters, dry.not_sent) == (3, {"sink not configured": 2})
    done = finish(desk, desk.send(dry.redrive_id, 3, "ann"))
    assert done.letters == 3
    assert sorted(place.sent()) == [0, 1, 2]


def test_an_error_inside_ends_a_redrive_and_the_next_can_begin(
    place: Place, desk: RedriveDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(range(2))
    with monkeypatch.context() as patch:
        patch.setattr(redrive_desk.Redrive, "run", lambda self: 1 / 0)
        failed = finish(desk, desk.count(SINK, "ann"))
    assert (failed.ended, failed.error) == ("error", "internal error in tidemill; see the log of this process")
    with pytest.raises(RequestProblem, match="only a completed dry run"):
        desk.send(failed.redrive_id, 0, "ann")
    assert finish(desk, desk.count(SINK, "ann")).letters == 2


async def test_the_command_of_a_letter_names_the_configuration(place: Place) -> None:
    write(place.letters, [delivery(1, letter_id="l-1")])
    pages = Pages(PageAbout("recordings", "somewhere", "", "1"))
    app = FastAPI()
    box = LetterBox(place.settings, config=Path("/etc/my orders.yaml"))
    build_letters_section(box, pages, 100).pages.mount(app)
    transport = httpx.ASGITransport(WithWorkers(app, Workers()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        letter = html.unescape((await client.get("/letters/l-1")).text)
    assert "tidemill dlq redrive '/etc/my orders.yaml' --id l-1" in letter


async def test_where_letters_cannot_be_sent_no_page_offers_it(place: Place) -> None:
    place.write(range(2))
    pages = Pages(PageAbout("recordings", "somewhere", "", "1", is_read_only=True))
    app = FastAPI()
    build_letters_section(LetterBox(place.settings), pages, 100).pages.mount(app)
    transport = httpx.ASGITransport(WithWorkers(app, Workers()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        listed = (await client.get("/letters")).text
        (letter_id, _) = re.findall(r"/letters/(\w+)\?", listed)
        letter = (await client.get(f"/letters/{letter_id}")).text
    assert "/redrives" not in listed + letter
    assert "checkbox" not in listed
    assert "tidemill dlq redrive" in letter


def test_an_old_dry_run_cannot_be_confirmed(place: Place) -> None:
    place.write(range(2))
    now = [1000.0]
    desk = RedriveDesk(place.settings, lambda action, by: None, lambda: now[0])
    dry = finish(desk, desk.count(SINK, "ann"))
    now[0] += redrive_desk.CONFIRM_SECONDS + 1
    with pytest.raises(RequestProblem, match="more than an hour old"):
        desk.send(dry.redrive_id, 2, "ann")


async def test_the_page_is_filled_from_filters_and_ticks_and_shows_text_only(
    place: Place, pipeline: ScriptedPipeline
) -> None:
    place.write(range(3), error=f"refused {SCRIPT}")
    async with log_in(pipeline) as client:
        filled = (await client.get("/redrives", params={"letter": ["a-1", f"b {SCRIPT}"], "kind": "delivery"})).text
        relative = (await client.get("/redrives?since=2h")).text
        begun = (await client.post("/api/v1/redrives", json={"to": "sink", "text": SCRIPT})).json()
        dry = await ended(client, begun["redrive_id"])
        page = (await client.get("/redrives")).text
        state = await client.get("/redrives/state")
        version = page.partition("state?seen=")[2].partition('"')[0]
        same = await client.get(f"/redrives/state?seen={version}")
        letters = (await client.get("/letters?kind=delivery")).text

    assert SCRIPT not in filled + page + state.text
    assert "a-1\nb &lt;script&gt;" in filled
    assert ">delivery</textarea>" in filled
    assert 'name="since" value="20' in relative
    assert dry["letters"] == 3
    assert 'data-word="send 3"' in page
    assert (state.status_code, same.status_code) == (200, 204)
    assert 'href="/redrives?kind=delivery"' in letters
    assert letters.count('form="redrive" name="letter"') == 3
