"""Sinks of other packages: found by entry point, checked, held to the contract, used by a pipeline."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sinks.own_sink import LinesSink, Options
from tests.sinks.test_through_a_pipeline import Known, Run

from tidemill import CollectResult, CustomPayload, ExecutorResult, Settings, SinkNotConfiguredError
from tidemill.core.errors import ConfigError
from tidemill.sinks.base import Sink
from tidemill.sinks.build import build_sinks
from tidemill.testing import JsonSinkContract

ENTRY_POINTS = """[tidemill.sinks]
lines = tests.sinks.own_sink:LinesSink
bare = tests.sinks.own_sink:Bare
nosink = tests.sinks.own_sink:NoSink
broken = tests.sinks.own_sink:Broken
misnamed = tests.sinks.own_sink:Misnamed
absent = tests.sinks.not_there:Sink
"""


class TestLinesContract(JsonSinkContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path / "lines"

    def make(self) -> Sink:
        return LinesSink("out", Options(path=self.path))

    def make_unusable(self) -> Sink:
        return LinesSink("out", Options(path=self.path / "no" / "folder"))

    def payload(self, data: Any, key: str = "k") -> Any:
        return CustomPayload(type="lines", key=key, data=data)

    def bad_payload(self) -> Any:
        return CustomPayload(type="lines", data="x" * 1_000_001)

    async def received(self, count: int) -> Sequence[bytes]:
        return self.path.read_bytes().splitlines()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package with these entry points be installed."""
    folder = tmp_path / "packages" / "own-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()


def config(kind: str, **options: Any) -> Settings:
    return Settings.model_validate({"sinks": {"custom": {kind: {"out": options}}}})


class ToLines(Known):
    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        return CollectResult(custom=[CustomPayload(type="lines", data={"id": result.task.task_id})])


@pytest.mark.usefixtures("installed")
async def test_a_pipeline_delivers_to_a_sink_of_another_package(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    options = {"path": str(path), "ui_url": "http://look/here"}
    run = Run(ToLines(), 100, sinks={"custom": {"lines": {"out": options}}})
    await run.to_end()
    assert len(path.read_text().splitlines()) == 100
    assert run.outbox.statistics().sinks["sinks.custom.lines.out"].delivered_payloads == 100
    with pytest.raises(SinkNotConfiguredError, match=r"sinks\.custom\.other\.<name>"):
        run.outbox.route(CollectResult(custom=[CustomPayload(type="other")]))
    with pytest.raises(SinkNotConfiguredError, match=r"sinks\.custom\.lines\.in is not configured; configured: out"):
        run.outbox.route(CollectResult(custom=[CustomPayload(type="lines", sink="in")]))


@pytest.mark.usefixtures("installed")
def test_without_a_model_a_sink_gets_its_section_without_what_all_sinks_have() -> None:
    made: Any = build_sinks(config("bare", anything=[1], ui_url="x"))["bare"]["out"]
    assert made.options == {"anything": [1]}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("unknown", {}, r"sinks\.custom\.unknown: no installed package .* absent, bare, broken, lines"),
        ("absent", {}, r"sinks\.custom\.absent: tests\.sinks\.not_there:Sink cannot be imported: ModuleNotFoundError"),
        ("nosink", {}, "is not a subclass"),
        ("misnamed", {}, "has the type 'other', not 'misnamed'"),
        ("broken", {"path": "x"}, r"sinks\.custom\.broken\.out cannot be created: RuntimeError: no luck"),
        ("lines", {"path": "x", "most_bytes": 0}, r"sinks\.custom\.lines\.out: most_bytes: Input should be greater"),
        ("lines", {"path": "x", "password": "hunter2"}, r"sinks\.custom\.lines\.out: password: Extra"),
    ],
)
def test_what_cannot_be_created_is_told_by_its_place(kind: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        build_sinks(config(kind, **options))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "package", "options"),
    [
        ("postgres", "asyncpg", {"dsn": "postgresql://host/db"}),
        ("mongo", "pymongo", {"uri": "mongodb://host", "database": "d"}),
        ("http", "httpx", {"url": "http://host/"}),
        ("redis", "redis", {}),
    ],
)
def test_a_client_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, package: str, options: dict[str, Any]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"tidemill.sinks.{kind}", raising=False)
    settings = Settings.model_validate({"sinks": {kind: {"one": options}}})
    with pytest.raises(ConfigError, match=rf"sinks\.{kind} needs the package .*pip install 'tidemill\[{kind}\]'"):
        build_sinks(settings)


def test_sinks_that_are_not_configured_are_not_imported() -> None:
    import subprocess

    code = (
        "import sys, tidemill.sinks.build as b; from tidemill import Settings; b.build_sinks(Settings.model_validate("
        "{'sinks': {'filesystem': {'f': {'base_path': 'x'}}}})); print([n for n in ('asyncpg', 'pymongo', 'httpx', "
        "'redis', 'confluent_kafka') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
