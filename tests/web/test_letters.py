"""Dead letters in the web UI: what `tidemill dlq` shows, with the same filters."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from tests.web.recordings import write_letters
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import connect, log_in

from tidemill.core.deadletters.redrive import Criteria
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.search import find_newest
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.problems import Problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def pipeline(folder: Path) -> ScriptedPipeline:
    return ScriptedPipeline({"dlq": {"path": str(folder)}})


async def test_the_newest_letters_are_those_of_the_command_line(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        page = (await client.get("/api/v1/letters?limit=5")).json()

    with open_letters(pipeline.settings) as box:
        found = find_newest(box, box.find_ranges(), Criteria(), 5)
    assert [row["letter_id"] for row in page["rows"]] == [
        each.letter.letter_id for each in reversed(found) if each.letter
    ]
    assert page["is_whole"] is True
    assert page["rows"][0]["messages"] == ["orders:0:11"]


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        ({"kind": "delivery"}, {0, 4, 8}),
        ({"sink": "postgres.db"}, {0, 4, 8}),
        ({"key": "key-1"}, {1, 4, 7, 10}),
        ({"id": "letter-1"}, {1, 10, 11}),
        ({"text": "value-7"}, {7}),
        ({"since": "2026-05-01T12:00:09", "until": "2026-05-01T12:00:11"}, {9, 10}),
        ({"text": "nothing"}, set()),
    ],
)
async def test_letters_are_found_by_the_filters(
    pipeline: ScriptedPipeline, filters: dict[str, str], offsets: set[int]
) -> None:
    async with log_in(pipeline) as client:
        rows = (await client.get("/api/v1/letters", params=filters)).json()["rows"]
        page = (await client.get("/letters", params=filters)).text

    assert {int(row["letter_id"].removeprefix("letter-")) for row in rows} == offsets
    assert {offset for offset in range(12) if f'/letters/letter-{offset}"' in page} == offsets


async def test_a_letter_has_everything_in_it_as_text(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        letter = (await client.get("/api/v1/letters/letter-4")).json()
        page = (await client.get("/letters/letter-4")).text
        pages = (await client.get("/letters")).text
        missing = await client.get("/api/v1/letters/letter-99")

    assert letter["sources"][0] | {"key": "key-1", "value": "value-4", "offset": 4} == letter["sources"][0]
    assert letter["payloads"] == [f'{{"data": "{SCRIPT}"}}']
    assert SCRIPT not in page + pages
    assert page.count(html.escape(SCRIPT)) >= 4
    assert missing.status_code == 404


@pytest.mark.parametrize("query", ["kind=nothing", "since=soon", "limit=0", f"id={'x' * 100}"])
async def test_a_wrong_filter_is_refused(pipeline: ScriptedPipeline, query: str) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get(f"/api/v1/letters?{query}")
    assert answer.status_code == 422


async def test_letters_need_a_login(pipeline: ScriptedPipeline) -> None:
    async with connect(pipeline) as client:
        assert (await client.get("/letters")).status_code == 303
        assert (await client.get("/api/v1/letters/letter-4")).status_code == 401


async def test_where_there_are_no_letters_the_page_says_why(tmp_path: Path) -> None:
    pipeline = ScriptedPipeline({"dlq": {"path": str(tmp_path / "none")}})
    async with log_in(pipeline) as client:
        page = await client.get("/letters")
        answer = await client.get("/api/v1/letters")

    assert page.status_code == 200
    assert answer.json()["detail"] in html.unescape(page.text)


def test_a_search_ends_in_time_and_says_so(pipeline: ScriptedPipeline) -> None:
    page = LetterBox(pipeline.settings, search_seconds=0.0).find(Criteria(kinds=("task",)), 10)
    assert page.is_whole is False
    with pytest.raises(Problem, match="or it was not found within 0 s"):
        LetterBox(pipeline.settings, search_seconds=0.0).read("letter-4")


def test_one_search_runs_at_a_time(pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    box = LetterBox(pipeline.settings)
    seen: list[int] = []

    def search_meanwhile(*arguments: Any) -> Any:
        with pytest.raises(Problem) as caught:
            box.find(Criteria(), 1)
        seen.append(caught.value.status)
        return open_letters(*arguments)

    monkeypatch.setattr("tidemill.web.letters.letter_box.open_letters", search_meanwhile)
    assert len(box.find(Criteria(), 3).rows) == 3
    assert seen == [429]
