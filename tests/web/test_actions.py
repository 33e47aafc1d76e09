"""What may be done from the pages and the API: by whom, what is refused, and what is recorded."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import ORIGIN, connect, log_in
from tests.web.test_access import TOKEN, with_accounts

from tidemill.core.errors import RemoteError
from tidemill.spark.progress import PauseStatus
from tidemill.web.pipeline.section import PipelineView


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(PipelineView, "note_action", lambda self, action, by: found.append((action, by)))
    return found


async def test_actions_are_carried_out_and_recorded_with_who_did_them(noted: list[tuple[str, str]]) -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        answers = [
            await client.post("/api/v1/actions/pause", json={"seconds": 900}),
            await client.post("/api/v1/actions/pause", json={"seconds": 60, "partition": 3}),
            await client.post("/api/v1/actions/resume", json={"partition": 3}),
            await client.post("/api/v1/actions/resume", json={}),
            await client.post("/api/v1/actions/engines/1/restart", json={"confirm": "restart 1"}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert [answer.json()["text"] for answer in answers] == [
        "Paused all partitions for 15 min 0 s.",
        "Paused partition 3 for 1 min 0 s.",
        "Resumed partition 3.",
        "Resumed all partitions.",
        "Engine 1 drains and then restarts.",
    ]
    assert pipeline.actions == ["pause 900 None key", "pause 60 3 key", "resume 3", "resume None", "restart 1"]
    assert noted == [
        ("pause all partitions for 900 s", "key"),
        ("pause partition 3 for 60 s", "key"),
        ("resume partition 3", "key"),
        ("resume all partitions", "key"),
        ("restart engine 1", "key"),
    ]


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("pause", {}, 422),
        ("pause", {"seconds": 0}, 422),
        ("pause", {"seconds": 1e-9}, 422),
        ("pause", {"seconds": 604_801}, 422),
        ("pause", {"seconds": "NaN"}, 422),
        ("pause", {"seconds": 60, "partition": -1}, 422),
        ("pause", {"seconds": 60, "partition": "3"}, 422),
        ("pause", {"seconds": 60, "until": 3}, 422),
        ("pause", {"seconds": 60, "partition": 99}, 409),
        ("pause", [1], 422),
        ("resume", {"partition": 7}, 409),
        ("engines/7/restart", {"confirm": "restart 7"}, 409),
        ("engines/-1/restart", {"confirm": "restart -1"}, 422),
        ("engines/x/restart", {"confirm": "restart x"}, 422),
        ("engines/1/restart", None, 422),
        ("engines/1/restart", {}, 422),
        ("engines/1/restart", {"confirm": "restart 0"}, 409),
        ("engines/1/restart", {"confirm": "Restart 1"}, 409),
        ("engines/1/restart", {"confirm": "restart 1", "force": True}, 422),
        ("drain", None, 422),
        ("drain", {"confirm": ""}, 409),
        ("drain", {"confirm": "order-worker"}, 409),
        ("drain", {"confirm": ["order-workers"]}, 422),
    ],
)
async def test_what_is_wrong_or_impossible_is_refused_and_not_recorded(
    noted: list[tuple[str, str]], action: str, body: Any, status: int
) -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        answer = await client.post(f"/api/v1/actions/{action}", json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert noted == []
    assert [action for action in pipeline.actions if not action.startswith("resume")] == []


async def test_who_may_only_read_changes_nothing(noted: list[tuple[str, str]]) -> None:
    pipeline = with_accounts()
    async with connect(pipeline) as client:
        for action in ("pause", "resume", "engines/0/restart", "drain", "release"):
            answer = await client.post(
                f"/api/v1/actions/{action}", json={"seconds": 60}, headers={"Authorization": f"Bearer {TOKEN}"}
            )
            assert (answer.status_code, "the role operate" in answer.json()["detail"]) == (403, True)
            foreign = await client.post(
                f"/api/v1/actions/{action}", headers={"Origin": "http://evil.example"}, json={"seconds": 60}
            )
            assert foreign.status_code == 403
    assert (pipeline.actions, noted) == ([], [])


async def test_an_action_needs_the_token_of_the_pages() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        del client.headers["X-CSRF-Token"]
        answer = await client.post("/api/v1/actions/pause", json={"seconds": 60}, headers={"Origin": ORIGIN})
    assert (answer.status_code, pipeline.actions) == (403, [])


async def test_a_link_that_does_not_answer_is_said() -> None:
    pipeline = ScriptedPipeline()

    def fail(slot: int) -> None:
        raise RemoteError("the link does not answer")

    pipeline.restart = fail  # type: ignore[method-assign]
    async with log_in(pipeline) as client:
        answer = await client.post("/api/v1/actions/engines/0/restart", json={"confirm": "restart 0"})
    assert (answer.status_code, answer.json()["detail"]) == (503, "the link does not answer")


async def test_what_is_paused_is_shown_with_its_end_and_by_whom() -> None:
    pipeline = ScriptedPipeline()
    pipeline.pauses = [PauseStatus(1, 1_790_000_900.4, 900.0, f"ann {SCRIPT}")]
    async with log_in(pipeline) as client:
        overview = (await client.get("/api/v1/overview")).json()
        page = (await client.get("/")).text
        pipeline.pauses = [PauseStatus(None, 1_790_000_900.4, 900.0, "ann")]
        whole = (await client.get("/")).text

    assert overview["pauses"] == [{"partition": 1, "until": 1_790_000_900.0, "by": f"ann {SCRIPT}"}]
    assert [each["name"] for each in overview["partitions"] if each["is_paused_by_user"]] == ["orders/1"]
    assert SCRIPT not in page
    assert page.count("paused by a user") == 1
    assert set(re.findall(r'id="((?:pause|resume)-\d+)"', page)) == {"pause-0", "resume-1", "pause-2", "pause-3"}
    assert whole.count("paused by a user") == 3, "the fourth stands still"
    assert not re.search(r'id="(pause|resume)-\d+"', whole)
    assert 'id="resume"' in whole


async def test_the_actions_are_in_the_openapi_document() -> None:
    async with log_in(ScriptedPipeline()) as client:
        paths = (await client.get("/api/openapi.json")).json()["paths"]
        page = (await client.get("/api/docs")).text
    posts = {path for path, operations in paths.items() if "post" in operations}
    wanted = {"release", "drain", "pause", "resume", "engines/{slot}/restart"}
    assert {f"/api/v1/actions/{name}" for name in wanted} <= posts
    assert "<caption>Body</caption>" in page
    assert "The length of the pause, from 1 second to 7 days." in page
    assert "Response: RedriveReport" in page
