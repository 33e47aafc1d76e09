"""`tidemill web`: recordings in a browser, from the command line."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.prepared import start
from tests.recorder.rows import message, messages
from tests.until import wait_until
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.writer import RecordWriter

HASH = "73300871f44c168e0c5b1a6fd2b7f2f5d9d5d7a2e0b6a7c9f1e3d5b7a9c8e6f4"


def record(folder: Path) -> None:
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "w") as writer:
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(1)))
        wait_until(lambda: writer.statistics.rows == 1, 60)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEMILL_CONFIG", "TIDEMILL_DEBUG__ENABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dir", "nothing"], "--dir nothing: not a folder of recordings"),
        (["--dir", "."], "no recordings of this user in . (--dir); pipelines write them"),
        (["empty.yaml"], "recordings-of-nobody (debug.db_dir)"),
        (["memory.yaml"], "debug.db_dir is ''"),
        (["open.yaml", "--dir", "db"], "debug.host 0.0.0.0 can be reached from other machines; set debug.users"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_what_cannot_be_shown_is_said_with_the_folder_and_the_setting(
    tmp_path: Path, words: list[str], said: str
) -> None:
    record(tmp_path / "db")
    (tmp_path / "empty.yaml").write_text("debug: {db_dir: recordings-of-nobody}\n")
    (tmp_path / "memory.yaml").write_text("debug: {db_dir: ''}\n")
    (tmp_path / "open.yaml").write_text("debug: {enabled: false, host: 0.0.0.0}\n")
    result = CliRunner().invoke(app, ["web", *words], env={"NO_COLOR": "1"})
    assert result.exit_code == 2, result.output
    assert said in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_on_the_next_free_port(tmp_path: Path, number: signal.Signals) -> None:
    record(tmp_path / "db")
    config = "debug: {db_dir: %s, tokens: {ci: {hash: %s}}, port: 0}\n" % (tmp_path / "db", HASH)  # noqa: UP031
    (tmp_path / "pipeline.yaml").write_text(config)
    with (tmp_path / "out").open("wb") as out:
        process = start(["web", "pipeline.yaml"], cwd=tmp_path, env=os.environ, stdout=out, stderr=out)
    try:
        said = wait_until(lambda: re.search(r"(http://\S+)/\n", (tmp_path / "out").read_text()))
        assert "?key=" not in said[1]
        with urllib.request.urlopen(f"{said[1]}/healthz", timeout=60) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(number)
    assert process.wait(60) == 0
