"""Reloads without Spark: what is loaded, what is refused, and what engines are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.until import wait_until

from tidemill.config.settings import Settings
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.live import reloader as module
from tidemill.spark.live.reloader import EngineCode, Reloader


class Plain(Handler[bytes, bytes]):
    async def arrange(self, messages: Any, pending: Any) -> list[Any]:
        return []


class Unpackable(Plain):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Files:
    """Code that tests save; loading it calls `load_next`."""

    def __init__(self) -> None:
        self.content = self.imported = "a"
        self.on_saved: Callable[[], None] = lambda: None
        self.load_next: Callable[[], tuple[Any, Settings]] = lambda: (Plain(), make_settings())

    def fingerprint(self) -> str:
        return self.content

    def load(self) -> tuple[Any, Settings]:
        return self.load_next()

    def watch(self, on_saved: Callable[[], None]) -> None:
        self.on_saved = on_saved

    def close(self) -> None:
        self.on_saved = lambda: None

    def save(self, content: str) -> None:
        self.content = content
        self.on_saved()


class Live:
    """Engines that only note what they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def drain(self, *, keep_memberships: bool = False) -> None:
        self.told.append("drain, keep places" if keep_memberships else "drain")


class Run:
    """A pipeline as far as its reloads are concerned."""

    def __init__(self) -> None:
        self.files = Files()
        self.live = Live()
        self.started: list[EngineCode] = []
        first = EngineCode(make_settings(), b"first")
        self.reloader = Reloader(self.files, "a", first, lambda: None, lambda live, code: self.started.append(code))
        self.reloader.attach(self.live)  # type: ignore[arg-type]

    def save(self, content: str, until: Callable[[], object]) -> None:
        self.files.save(content)
        wait_until(lambda: self.reloader.step() or until())  # type: ignore[func-returns-value]


def make_settings(**kafka: str) -> Settings:
    values = {"kafka": {"source_topic": "t", **kafka}, "sinks": {"filesystem": {"out": {"base_path": "output"}}}}
    return Settings.model_validate(values)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    made = Run()
    with made.reloader:
        made.reloader.step()
        yield made


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


def test_engines_drain_in_their_places_and_others_start_with_the_new_code(run: Run) -> None:
    run.save("b", lambda: run.live.told)
    assert run.live.told == ["drain, keep places"]
    assert run.started == []

    assert run.reloader.ended(RunFinished(EngineEnding.DRAINED)) is False

    (code,) = run.started
    assert code.packed != b"first"
    assert code.settings.sinks.filesystem["out"].base_path == str(Path.cwd() / "output")


def test_engines_that_were_killed_while_they_drained_are_replaced_too(run: Run) -> None:
    run.save("b", lambda: run.live.told)

    assert run.reloader.ended(RunFinished(EngineEnding.OVERDUE, 0, "hung")) is False
    assert len(run.started) == 1


def test_engines_whose_place_another_process_took_are_not_replaced(run: Run) -> None:
    run.save("b", lambda: run.live.told)

    assert run.reloader.ended(RunFinished(EngineEnding.FENCED, 0, "taken")) is True
    assert run.started == []


def test_the_first_code_runs_again_after_new_code_that_fails(run: Run, logs: list[Any]) -> None:
    run.save("b", lambda: run.live.told)
    run.reloader.ended(RunFinished(EngineEnding.DRAINED))

    assert run.reloader.ended(RunFinished(EngineEnding.FAILED, 1, "HandlerError: on_ready raised")) is False

    assert run.started[-1].packed == b"first"
    assert [entry["error"] for entry in logs if entry["log_level"] == "warning"] == [
        "slot 1: HandlerError: on_ready raised"
    ]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: (Handler(), make_settings()), "does not define arrange"),
        (lambda: (Unpackable(), make_settings()), "'lock' of Unpackable"),
        (lambda: (Plain(), Settings()), "no sink is configured"),
        (lambda: (Plain(), make_settings(source_topic="other")), "kafka has changed; restart tidemill"),
    ],
)
def test_code_that_no_engine_could_run_is_shown_and_drains_nothing(
    run: Run, logs: list[Any], load: Callable[[], Any], said: str
) -> None:
    run.files.load_next = load

    run.save("b", lambda: [entry for entry in logs if entry["log_level"] == "warning"])

    (entry,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert said in entry["error"]
    assert "the running code stays in use" in entry["event"]
    assert run.live.told == []


@pytest.mark.parametrize("fails", [False, True], ids=["loads", "does not load"])
def test_files_that_are_saved_while_they_are_loaded_are_loaded_again(run: Run, logs: list[Any], fails: bool) -> None:
    loads = []

    def load() -> tuple[Any, Settings]:
        loads.append(run.files.content)
        if len(loads) == 1:
            run.files.content = "c"  # what watches the files notices it later
            if fails:
                raise SyntaxError("half a file")
        return Plain(), make_settings()

    run.files.load_next = load
    run.save("b", lambda: run.live.told)
    run.files.on_saved()  # now it does
    run.reloader.step()
    assert loads == ["b", "c"]
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    run.reloader.ended(RunFinished(EngineEnding.DRAINED))
    assert len(run.started) == 1
    run.reloader.on_all_ready()
    run.reloader.step()

    run.save("b", lambda: len(run.live.told) == 2)  # an undo is a change
    assert loads == ["b", "c", "b"]


def test_code_that_was_saved_again_while_it_was_loaded_does_not_replace_the_last_good_code(run: Run) -> None:
    run.save("b", lambda: run.live.told)
    run.reloader.ended(RunFinished(EngineEnding.DRAINED))  # b is on trial, a would continue
    seen: list[str] = []

    def load() -> tuple[Any, Settings]:
        seen.append(run.files.content)
        run.files.content = "c"
        return Plain(), make_settings()

    run.files.load_next = load
    run.save("a", lambda: len(run.live.told) == 2)

    assert seen == ["a", "c"]
    assert run.reloader._codes["a"].packed == b"first"


def test_a_load_that_takes_long_is_reported(run: Run, logs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_LOAD_SECONDS", 0.05)
    release = threading.Event()
    run.files.load_next = lambda: (release.wait(60), (Plain(), make_settings()))[1]

    run.save("b", lambda: logs)

    assert "still being loaded" in logs[0]["event"]
    release.set()
    run.save("b", lambda: run.live.told)


def test_a_save_while_a_load_never_ends_is_answered(run: Run, logs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_LOAD_SECONDS", 0.05)
    release = threading.Event()
    run.files.load_next = lambda: (release.wait(60), (Plain(), make_settings()))[1]
    run.save("b", lambda: logs)

    monkeypatch.setattr(module, "SLOW_LOAD_SECONDS", 0.0)  # both clocks may say just under the limit
    run.files.save("c")

    assert "saved again while an earlier load is still running" in logs[1]["event"]
    assert logs[1]["log_level"] == "warning"
    release.set()
    wait_until(lambda: run.reloader.step() or run.live.told)  # type: ignore[func-returns-value]
    run.files.save("d")
    assert not [entry for entry in logs[2:] if "saved again" in entry["event"]]


def test_a_stop_ends_the_run_although_code_waits_to_start(run: Run) -> None:
    run.save("b", lambda: run.live.told)
    run.reloader.stop()

    assert run.reloader.ended(RunFinished(EngineEnding.DRAINED)) is True
    assert run.started == []
