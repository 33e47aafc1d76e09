"""The sink of the page on writing one is found, made and used as the page says; its tests are run with the page."""

from __future__ import annotations

import asyncio
import importlib
import sqlite3
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs.snippets import ROOT, blocks

from tidemill import CustomPayload
from tidemill.cli.doctor.checks import check_sink
from tidemill.config.loading import load_settings
from tidemill.sinks.build import build_sink
from tidemill.testing import deliver

PAGE = ROOT / "docs/how-to/write-a-sink.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of the page, and what an installer makes of its project file."""
    for block in blocks(PAGE):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.code)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "table_sink-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    )
    (installed / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "table_sink", raising=False)
    return tmp_path


def test_the_sink_is_found_by_its_entry_point_checked_and_used(written: Path) -> None:
    settings = load_settings(written / "tidemill.yaml", environ={})
    assert check_sink(settings, "table", "audit") == "connected"
    sink = build_sink(settings, "table", "audit")

    async def use() -> None:
        await sink.connect()
        payloads = [CustomPayload(type="table", key="all", data={"seen": text}) for text in ("one", "x" * 10_000)]
        confirmed, refused = await deliver(sink, payloads)
        assert confirmed is None
        assert refused is not None
        assert not refused.retryable
        await sink.close()

    asyncio.run(use())
    with sqlite3.connect(written / "audit.db") as database:
        assert database.execute("SELECT key, body FROM rows").fetchall() == [("all", b'{"seen":"one"}')]
