"""The values that the shell completes, through the completion that Typer installs for bash."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli import completion
from tidemill.cli.main import app

CONFIG = """
kafka: {source_topic: orders}
sinks: {kafka: {results: {topic: results-topic}}, filesystem: {files: {base_path: out}}}
"""


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEMILL_CONFIG", raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "spec.yaml").write_text("- {name: fives, classpath: a.B}\n- {name: fours, classpath: a.B}\n")
    (tmp_path / "jobs.py").write_text(
        "import nothing_of_this_is_imported\nclass Orders(tidemill.Handler[A, B]): pass\n"
        "class More(OrderHandler): pass\nclass Other(Thing): pass\n"
    )
    (tmp_path / "wrong.py").write_text("class (")

    def run(line: str) -> list[str]:
        words = line.split(" ")
        result = CliRunner().invoke(
            app,
            env={
                "_TIDEMILL_COMPLETE": "complete_bash",
                "COMP_WORDS": "\n".join(words),
                "COMP_CWORD": str(len(words) - 1),
            },
            prog_name="tidemill",
        )
        return result.stdout.split()

    return run


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("tidemill dlq list --kind ta", ["task"]),
        ("tidemill dlq list c.yaml --sink ", ["files", "filesystem.files", "results", "kafka.results"]),
        ("tidemill dlq redrive c.yaml --sink file", ["files", "filesystem.files"]),
        ("tidemill dlq redrive c.yaml --to ", ["source", "sink", "orders", "orders_dlq", "results-topic"]),
        ("tidemill dlq redrive missing.yaml --to s", ["source", "sink"]),
        ("tidemill run c.yaml --handler ", ["jobs:More", "jobs:Orders"]),
        ("tidemill backfill --handler jobs:O", ["jobs:Orders"]),
        ("tidemill doctor --handler jobs:M", ["jobs:More"]),
        # As bash splits words at colons: it replaces what follows the last one.
        ("tidemill doctor --handler jobs : M", ["More"]),
        ("tidemill run c.yaml --handler jobs :", ["More", "Orders"]),
        ("tidemill run c.yaml --handler lost : O", []),
        ("tidemill run --handler jobs : Orders --de", ["--dev"]),
        ("tidemill triggers events spec.yaml --trigger f", ["fives", "fours"]),
        ("tidemill triggers events missing.yaml --trigger ", []),
    ],
)
def test_values_are_completed(complete, line, values):
    assert complete(line) == values


@pytest.mark.timeout(60)
def test_looking_for_handlers_neither_blocks_nor_warns(complete, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "pattern.py").write_text('PATTERN = "\\d"\nclass Found(Handler): pass\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert complete("tidemill run --handler p") == ["pattern:Found"]


def test_only_so_many_bytes_are_searched_for_handlers(complete, tmp_path, monkeypatch):
    monkeypatch.setattr(completion, "_MAX_TOTAL_BYTES", 100)
    for number in range(10):
        (tmp_path / f"x{number}.py").write_text(f"class A(Handler): pass\n{'#' * 40}\n")
    assert len(complete("tidemill run --handler x")) == 1
