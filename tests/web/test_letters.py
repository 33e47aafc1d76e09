"""Dead letters in the web UI: what `tidemill dlq` shows, with the same filters."""

from __future__ import annotations

import base64
import functools
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.letters import letter, write
from tests.web.recordings import write_letters
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import connect, log_in

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.deadletters import backwards
from tidemill.deadletters.folder_reader import FolderReader
from tidemill.deadletters.letter import encode_letter
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.payloads import Blob
from tidemill.deadletters.search import find_newest
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.testing.kafka import produce, unique_name
from tidemill.web.letters.letter_box import LetterBox, open_cursor
from tidemill.web.problems import RequestProblem


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
        found = find_newest(box, box.find_ranges(), LetterCriteria(), 5)
    assert [row["letter_id"] for row in page["rows"]] == [
        each.letter.letter_id for each in reversed(found) if each.letter
    ]
    assert (page["is_whole"], page["searched"], page["total"]) == (False, 5, 12)
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
    assert {offset for offset in range(12) if f"/letters/letter-{offset}?" in page} == offsets


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


SECRETS = {
    "value": '{"card": {"password": "hunter2a"}, "n": 1}',
    "payload": '{"data": {"api_key": "hunter2b"}, "topic": "out"}',
    "header": ("authorization", "hunter2c"),
    "text": "postgres://me:hunter2d@host/db",
}


async def test_secrets_in_letters_are_masked_as_on_the_pages_of_messages(tmp_path: Path) -> None:
    sent = letter(1, letter_id="with", original_payloads=[SECRETS["payload"]])
    other = letter(2, letter_id="text")
    name, value = SECRETS["header"]
    sent.sources[0].value, sent.sources[0].headers = SECRETS["value"], [(name, value), ("plain", "shown")]
    other.sources[0].value = SECRETS["text"]
    write(tmp_path, [sent, other])
    async with log_in(ScriptedPipeline({"dlq": {"path": str(tmp_path)}})) as client:
        answers = [await client.get(f"{api}/letters/{each}") for api in ("/api/v1", "") for each in ("with", "text")]

    assert "hunter2" not in "".join(answer.text for answer in answers)
    found = answers[0].json()
    assert json.loads(found["sources"][0]["value"]) == {"card": {"password": "***"}, "n": 1}
    assert found["sources"][0]["headers"] == [["authorization", "***"], ["plain", "shown"]]
    assert json.loads(found["payloads"][0])["topic"] == "out"
    assert answers[1].json()["sources"][0]["value"] == "postgres://***@host/db"


async def test_a_value_that_is_not_text_is_shown_as_base64_and_called_so(tmp_path: Path) -> None:
    sent = letter(1, letter_id="bytes")
    sent.sources[0].value = Blob(base64="/w==")
    write(tmp_path, [sent, letter(2, letter_id="text")])
    async with log_in(ScriptedPipeline({"dlq": {"path": str(tmp_path)}})) as client:
        found = [(await client.get(f"/api/v1/letters/{each}")).json()["sources"][0] for each in ("bytes", "text")]
        pages = [(await client.get(f"/letters/{each}")).text for each in ("bytes", "text")]

    assert found[0]["value"] == "/w=="
    assert [each["value_encoding"] for each in found] == ["base64", "text"]
    assert ["Value (base64)" in page for page in pages] == [True, False]


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


def test_a_search_ends_in_time_and_goes_on_with_its_cursor(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.deadletters.backwards.FIRST_OFFSETS", 2)
    monkeypatch.setattr("tidemill.deadletters.backwards._LEAST_OFFSETS", 1)
    box, criteria = LetterBox(pipeline.settings, slice_seconds=0.0), LetterCriteria(kinds=("task",))
    whole = LetterBox(pipeline.settings).find(criteria, 10)
    assert (whole.is_whole, whole.cursor, whole.searched, whole.total) == (True, None, 12, 12)
    page = box.find(criteria, 10)
    rows, searched = page.rows, [page.searched]
    while page.cursor is not None:
        assert page.is_whole is False
        page = box.find(LetterCriteria(kinds=("task",), since=1.0), 10, open_cursor(page.cursor))
        rows += page.rows
        searched.append(page.searched)
    assert [row.letter_id for row in rows] == [row.letter_id for row in whole.rows]
    assert searched == sorted(set(searched))
    assert searched[-1] == 12
    with pytest.raises(RequestProblem, match=r"letter-0.*not found within 0 s"):
        LetterBox(pipeline.settings, search_seconds=0.0).read("letter-0")


async def test_the_page_goes_on_with_a_search_by_itself(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.deadletters.backwards.FIRST_OFFSETS", 2)
    monkeypatch.setattr("tidemill.deadletters.backwards._LEAST_OFFSETS", 1)
    monkeypatch.setattr("tests.web.serving.LetterBox", functools.partial(LetterBox, slice_seconds=0.0))
    async with log_in(pipeline) as client:
        address, pages = "/letters?kind=delivery&since=2026-05-01", []
        while address:
            pages.append((await client.get(address)).text)
            found = re.search(r'hx-get="([^"]+)"', pages[-1])
            address = html.unescape(found[1]) if found else ""

    assert len(pages) > 3
    assert all('hx-trigger="load"' in page for page in pages[:-1])
    assert "2 of 12 records searched" in pages[0]
    assert "All 12 records have been searched." in pages[-1]
    listed = [row for page in pages for row in re.findall(r"/letters/letter-(\d+)\?", page)]
    assert listed == ["8", "4", "0"]


async def test_a_letter_is_found_where_its_link_says(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FolderReader._read_group
    seen: list[int] = []

    def count(*given: Any) -> Any:
        for found in read(*given):
            seen.append(found.offset)
            yield found

    monkeypatch.setattr(FolderReader, "_read_group", staticmethod(count))
    async with log_in(pipeline) as client:
        row = (await client.get("/api/v1/letters?key=key-1")).json()["rows"][-1]
        seen.clear()
        direct = await client.get(f"/api/v1/letters/{row['letter_id']}", params={"at": row["at"]})
        assert len(seen) == 1
        moved = await client.get(f"/api/v1/letters/{row['letter_id']}", params={"at": "0:999999"})
        wrong = await client.get(f"/api/v1/letters/{row['letter_id']}", params={"at": "x"})
    assert direct.json() == moved.json()
    assert wrong.status_code == 422


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "AAAA",
        "\u00e9",
        *(
            base64.urlsafe_b64encode(msgspec.msgpack.encode(each)).decode()
            for each in ([math.nan, None, 1, b"", {}], [-5.0, None, 1, b"", {}], [None, None, 1, b"", {"a": 1}], [1])
        ),
    ],
)
async def test_a_cursor_that_is_not_ours_is_refused(pipeline: ScriptedPipeline, cursor: str) -> None:
    async with log_in(pipeline) as client:
        assert (await client.get("/api/v1/letters", params={"cursor": cursor})).status_code == 422
        assert (await client.get("/letters", params={"cursor": cursor})).status_code == 422


async def test_a_cursor_of_other_letters_is_refused(pipeline: ScriptedPipeline, tmp_path: Path) -> None:
    other = ScriptedPipeline({"dlq": {"path": str(write_letters(tmp_path))}})
    async with log_in(other) as client:
        cursor = (await client.get("/api/v1/letters?limit=2")).json()["cursor"]
        assert (await client.get("/api/v1/letters", params={"cursor": cursor})).status_code == 200
    for name in tmp_path.glob("*.parquet"):
        name.rename(name.with_name(f"other-{name.name}"))
    async with log_in(other) as client:
        answer = await client.get("/api/v1/letters", params={"cursor": cursor})
    assert (answer.status_code, "repeat the search" in answer.json()["detail"]) == (409, True)


async def test_a_list_has_at_most_500_letters_of_which_only_rows_are_kept(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def find(box: Any, ranges: Any, criteria: Any, limit: int, *rest: Any) -> Any:
        asked.append(limit)
        return backwards.find_newest_first(box, ranges, criteria, limit, *rest)

    monkeypatch.setattr("tidemill.web.letters.letter_box.find_newest_first", find)
    async with log_in(pipeline) as client:
        assert len((await client.get("/api/v1/letters?limit=5000")).json()["rows"]) == 12
    assert asked == [500]


def test_one_search_runs_at_a_time(pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    box = LetterBox(pipeline.settings, wait_seconds=0.01)
    seen: list[int] = []

    def search_meanwhile(*arguments: Any) -> Any:
        with pytest.raises(RequestProblem) as caught:
            box.find(LetterCriteria(), 1)
        seen.append(caught.value.status)
        return open_letters(*arguments)

    monkeypatch.setattr("tidemill.web.letters.letter_box.open_letters", search_meanwhile)
    assert len(box.find(LetterCriteria(), 3).rows) == 3
    assert seen == [429]


def test_a_topic_is_searched_backwards_in_many_steps(
    embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.deadletters.backwards.FIRST_OFFSETS", 2)
    monkeypatch.setattr("tidemill.deadletters.backwards.MOST_OFFSETS", 8)
    monkeypatch.setattr("tidemill.deadletters.backwards._LEAST_OFFSETS", 1)
    topic = unique_name("letters")
    embedded_kafka.create_topic(topic, 2)
    for number in range(40):
        value = encode_letter(letter(number, timestamp=f"2026-05-01T12:00:{number:02d}+00:00"))
        produce(embedded_kafka.bootstrap, topic, [value], partition=number % 2)
    kafka = {"brokers": embedded_kafka.bootstrap, "source_topic": "orders", "consumer_group": "g"}
    settings = Settings.model_validate({"kafka": kafka, "dlq": {"topic": topic}})
    box = LetterBox(settings, slice_seconds=60.0)

    found = box.find(LetterCriteria(keys=("key-1",)), 5)
    assert [row.messages[0].rpartition(":")[2] for row in found.rows] == ["37", "34", "31", "28", "25"]
    missed = box.find(LetterCriteria(text="nothing like it"), 5)
    assert (missed.rows, missed.is_whole, missed.searched) == ([], True, 40)
