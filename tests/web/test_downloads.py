"""Recordings as downloads: consistent copies of what is listed, and nothing else."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.recorder.rows import message, messages
from tests.until import until, wait_until
from tests.web.recordings import COUNT, record
from tests.web.scripted_pipeline import ScriptedPipeline
from tests.web.serving import connect, log_in

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.sealing import SealPolicy
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.queries import MessageQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.reading.tar_stream import FOLDER, stream_tar
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.downloads import Downloads
from tidemill.web.workers import _WORKERS, Workers

LIVE = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recording that has ended, and one that is being written, with open and sealed segments."""
    folder = tmp_path_factory.mktemp("downloads") / "db"
    record(folder)
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "w", policy=SealPolicy(max_rows=50)) as writer:
        for number in range(LIVE):
            writer.put_rows("e", 0, number + 1, RowTable.MESSAGES, messages(message(number, topic="live")))
        wait_until(lambda: writer.statistics.rows == LIVE, 30)
        yield folder


@pytest.fixture
def pipeline(folder: Path) -> ScriptedPipeline:
    return ScriptedPipeline({"debug": {"enabled": True, "db_dir": str(folder)}})


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which is empty again when a download has ended."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def list_names(client: httpx.AsyncClient) -> dict[str, str]:
    found = (await client.get("/api/v1/recordings")).json()
    return {row["recording"]: f"{row['recording']}/{row['period']}" for row in found}


def unpack(body: bytes, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        archive.extractall(folder, filter="data")
    return folder / FOLDER


def count(folder: Path) -> int:
    page = Reader(folder).find_messages(MessageQuery(), limit=10_000)
    assert page.problems == []
    return len(page.rows)


async def test_a_recording_that_is_being_written_is_downloaded_with_all_that_it_has(
    pipeline: ScriptedPipeline, tmp_path: Path, temporary: Path
) -> None:
    async with log_in(pipeline) as client:
        name = (await list_names(client))["g.w"]
        answer = await client.get("/api/v1/recordings/download", params={"period": name})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"] == f'attachment; filename="{name.partition("/")[2]}.tar"'
    unpacked = unpack(answer.content, tmp_path)
    assert count(unpacked) == LIVE
    assert not any(path.suffix == ".open" for path in unpacked.rglob("*"))
    assert list(temporary.iterdir()) == []


async def test_chosen_recordings_are_merged_into_one_folder(pipeline: ScriptedPipeline, tmp_path: Path) -> None:
    async with log_in(pipeline) as client:
        names = list((await list_names(client)).values())
        answer = await client.get("/api/v1/recordings/download", params={"period": [*names, names[0]]})
    folder = unpack(answer.content, tmp_path)
    assert count(folder) == COUNT + LIVE
    assert {run.recording for run in Reader(folder).list_runs()} == {"g.w", "order-workers.worker-1"}


@pytest.mark.parametrize(
    "name",
    ["", "/", "g.w", "g.w/", "g.w/../..", "../db/g.w", "/etc/passwd", "g.w/%2e%2e", "g.w/w-live", "g.w\0/x", "\ud800"],
)
async def test_what_is_not_listed_is_not_downloaded(pipeline: ScriptedPipeline, name: str) -> None:
    async with log_in(pipeline) as client:
        query = httpx.QueryParams({"period": name.encode("utf-8", "surrogatepass").decode("latin-1")})
        answer = await client.get("/api/v1/recordings/download", params=query)
        after = await client.get("/api/v1/recordings/download", params={"period": (await list_names(client))["g.w"]})
    assert answer.status_code == 404
    assert after.status_code == 200


async def test_nothing_is_downloaded_without_a_login_or_a_choice(pipeline: ScriptedPipeline) -> None:
    async with connect(pipeline) as client:
        answer = await client.get("/api/v1/recordings/download?period=g.w/x")
    async with log_in(pipeline) as client:
        nothing = await client.get("/api/v1/recordings/download")
    assert (answer.status_code, nothing.status_code) == (401, 422)


async def test_one_download_at_a_time_which_ends_with_its_client(folder: Path, temporary: Path) -> None:
    _WORKERS.set(Workers())
    archive = Archive(Reader(folder), 100)
    downloads = Downloads(archive)
    names = [f"{row.recording}/{row.period}" for row in archive.list_recordings()]
    response: Any = await downloads.start(names)
    pieces = response.body_iterator
    await anext(pieces)
    await anext(pieces)
    with pytest.raises(Exception, match="another download is running"):
        await downloads.start(names)
    assert list(temporary.iterdir()) != []
    await pieces.aclose()
    assert list(temporary.iterdir()) == []
    downloads.close()
    assert (await downloads.start(names)).status_code == 200


async def test_a_client_that_reads_nothing_is_disconnected(folder: Path, temporary: Path) -> None:
    _WORKERS.set(Workers())
    archive = Archive(Reader(folder), 100)
    downloads = Downloads(archive, idle_seconds=0.05)
    names = [f"{row.recording}/{row.period}" for row in archive.list_recordings()]

    async def read_once() -> None:
        response: Any = await downloads.start(names)
        async for _ in response.body_iterator:
            await asyncio.Event().wait()

    reading = asyncio.create_task(read_once())
    await until(reading.done)
    assert reading.cancelled()


def test_a_segment_that_is_damaged_is_named_in_the_archive(tmp_path: Path) -> None:
    record(tmp_path / "db")
    (segment,) = (tmp_path / "db").rglob("messages-*.parquet")
    segment.unlink()
    segment.mkdir()
    period = Reader(tmp_path / "db").find_period(
        "order-workers.worker-1", next((tmp_path / "db" / "order-workers.worker-1").glob("*.db")).stem
    )
    assert period is not None
    body = b"".join(stream_tar([period]))
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert any(name.endswith(".db") for name in archive.getnames())
        told = archive.extractfile(f"{FOLDER}/PROBLEMS.txt")
        assert told is not None
        assert b"messages-000001 is damaged and was left out" in told.read()


async def test_no_room_for_the_copy_is_said_before_the_download(
    pipeline: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.web.recorded.downloads.find_room", lambda periods: (5_000, 10))
    async with log_in(pipeline) as client:
        name = (await list_names(client))["g.w"]
        answer = await client.get("/api/v1/recordings/download", params={"period": name})
    assert answer.status_code == 507
    assert "set TMPDIR" in answer.json()["detail"]


async def test_the_page_says_what_retention_removes_next(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        rows = {row["recording"]: row for row in (await client.get("/api/v1/recordings")).json()}
        page = (await client.get("/recordings")).text
    ended, live = rows["order-workers.worker-1"], rows["g.w"]
    assert (ended["goes_next"], live["goes_next"]) == (True, False)
    assert live["kept_until"] is None
    assert 23 * 3600 < ended["kept_until"] - ended["last_at"] < 25 * 3600
    assert page.count("removed next") == 1
    assert page.count('type="checkbox"') == 2
