"""`tidemill status`: what it answers of pipelines and trigger hosts, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidemill.cli.pipelines import status as status_module
from tidemill.cli.pipelines.release import describe_release
from tidemill.cli.pipelines.status import complete, describe_report, find_reports, is_trigger_list
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.link.progress import GROUP_NAME, EngineProgress, SinkStats
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.sockets.pipeline_socket import release_brakes
from tidemill.spark.live.control_desk import ControlDesk
from tidemill.spark.live.status_report import SILENT_SECONDS, build_report, find_problems
from tidemill.spark.pipeline import Pipeline
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress
from tidemill.spark.run_state import RunPhase, RunState

Run = Callable[..., "subprocess.CompletedProcess[str]"]
RUNNING = RunState(RunPhase.RUNNING, 60.0, 65.0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Name a folder for sockets; a short name, as the kernel wants it."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    monkeypatch.delenv("TIDEMILL_CONFIG", raising=False)
    yield made / "tidemill"
    shutil.rmtree(made)


def settings(group: str = "g") -> Settings:
    kafka = {"brokers": "b:9092", "consumer_group": group, "source_topic": "t"}
    return Settings.model_validate({"kafka": {**kafka, "client_config": {"sasl.password": "hunter2"}}})


def refused() -> PipelineProgress:
    progress = busy()
    progress.waits = {GROUP_NAME: "the brokers do not allow it"}
    return progress


def busy(state: str = "running", silent_seconds: float = 0.1) -> PipelineProgress:
    engine = EngineProgress(
        messages_done=1234,
        tasks_failed=2,
        dead_lettered=2,
        letter_kinds={"task": 2},
        partitions=["t/0", "t/1"],
        lag={"t/0": 5},
        waits={"sinks.kafka.out": "no broker answers"},
        sinks={"sinks.kafka.out": SinkStats(delivered_payloads=1200)},
    )
    return sum_progress((), [engine], [EngineStatus(0, state, 7, "h", 1, silent_seconds, engine)])


def desk(group: str, worker: str, moment: Callable[[], tuple[RunState, PipelineProgress]], **more: Any) -> ControlDesk:
    def report(progress: PipelineProgress, rate: float) -> dict[str, Any]:
        return build_report(settings(group), worker, moment()[0], progress, rate)

    return ControlDesk(settings(group).kafka, worker, lambda: moment()[1], report, more)


def test_a_running_pipeline_is_well_although_it_waits_for_a_sink() -> None:
    report = build_report(
        settings(),
        "w",
        RUNNING,
        busy(),
        99.6,
        {"metrics": "http://127.0.0.1:9090", "web": "http://127.0.0.1:8080/?key=k"},
    )

    assert report["healthy"] is True
    assert "hunter2" not in json.dumps(report)
    assert describe_report({**report, "pid": 7}).splitlines() == [
        "pipeline g on b:9092, worker w (process 7): running, started 1 min 5 s ago",
        "  engines       1 of 1 running, 2 partitions",
        "  messages      1,234 done, 100/s",
        "  lag           5, 0 in flight",
        "  tasks         0 running, 0 queued, 0 in backoff, 0 done, 2 failed, 0 retried",
        "  dead letters  2 (2 task)",
        "  kafka.out     1,200 delivered",
        "  waiting for   sinks.kafka.out: no broker answers",
        "  web           http://127.0.0.1:8080/?key=k",
        "  metrics       http://127.0.0.1:9090/metrics",
    ]


@pytest.mark.parametrize(
    ("state", "progress", "problem"),
    [
        (
            RunState(step="no broker yet", step_seconds=5.0),
            PipelineProgress(),
            "it is starting: no broker yet (5 s)",
        ),
        (RUNNING, sum_progress((), (), [EngineStatus(0, "starting")]), "it is starting: the engines are starting"),
        (RunState(RunPhase.STOPPING), busy(), "it is stopping"),
        (RUNNING, busy("waiting"), "engine 0 is not running: waiting (start 1)"),
        (RUNNING, busy(silent_seconds=SILENT_SECONDS), "engine 0 has been silent for 10 s"),
        (RUNNING, busy("finished"), None),
        (RunState(RunPhase.DRAINING), busy(), None),
        (RUNNING, refused(), "it cannot read its topic: the brokers do not allow it"),
    ],
)
def test_what_is_wrong_with_a_pipeline_is_named(
    state: RunState, progress: PipelineProgress, problem: str | None
) -> None:
    assert find_problems(state, progress) == ([] if problem is None else [problem])


def test_the_pipelines_of_a_configuration_are_found_and_others_are_not(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "tidemill.yaml"
    config.write_text("kafka: {brokers: 'b:9092', consumer_group: g, source_topic: t}\n")

    def moment() -> tuple[RunState, PipelineProgress]:
        return RUNNING, busy()

    with desk("g", "one", moment), desk("g", "two", moment), desk("other", "three", moment):
        reports, silent = find_reports(config)
        assert [(report["worker"], report["pid"], report["healthy"]) for report in reports] in (
            [("one", os.getpid(), True), ("two", os.getpid(), True)],
            [("two", os.getpid(), True), ("one", os.getpid(), True)],
        )
        assert silent == 0
        assert {report["worker"] for report in find_reports(None)[0]} == {"one", "two", "three"}
    assert find_reports(config) == ([], 0)
    assert list(folder.iterdir()) == []


def test_the_desk_answers_while_something_else_of_the_pipeline_hangs_and_survives_a_bug(folder: Path) -> None:
    hanging = threading.Event()

    async def hang(request: dict[str, Any]) -> dict[str, Any]:
        import asyncio

        await asyncio.to_thread(hanging.wait, 60)
        return {}

    def fail(request: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("no such thing")

    from tidemill.runtime.sockets.pipeline_socket import ask_pipelines

    with desk("g", "w", lambda: (RUNNING, busy()), hang=hang, fail=fail):
        client = threading.Thread(target=ask_pipelines, args=(settings().kafka, {"do": "hang"}, 60.0))
        client.start()
        answers = ask_pipelines(settings().kafka, {"do": "fail"}, 30.0)
        assert [answer["error"] for answer in answers.reports] == ["it failed: LookupError: no such thing"]
        assert ask_pipelines(settings().kafka, {"do": "status"}, 30.0).reports[0]["messages_done"] == 1234
        hanging.set()
        client.join(30)


def test_sockets_of_dead_processes_are_removed_and_silent_ones_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "_ANSWER_SECONDS", 0.2)
    folder.mkdir(mode=0o700)
    dead, silent = folder / "pipeline.0.dead.sock", folder / "pipeline.0.silent.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(silent))
        hung.listen()
        assert find_reports(None) == ([], 1)
    assert not dead.exists()


def test_exit_codes_say_whether_it_runs(folder: Path, tidemill: Run, tmp_path: Path) -> None:
    config = tmp_path / "tidemill.yaml"
    config.write_text("kafka: {brokers: 'b:9092', consumer_group: g, source_topic: t}\n")
    now = [(RUNNING, busy())]

    nothing = tidemill("status")
    assert nothing.returncode == ExitCode.REMOTE
    assert (
        nothing.stderr
        == "this user runs no pipeline or trigger host on this machine; to start one, see tidemill run --help\n"
    )
    other = tidemill("status", config)
    assert other.returncode == ExitCode.REMOTE
    assert f"this user runs nothing with {config}" in other.stderr
    with desk("g", "w", lambda: now[0]):
        well = tidemill("status", config, "--json")
        assert well.returncode == ExitCode.OK, well.stderr
        document = json.loads(well.stdout)
        assert (document["healthy"], document["processes"][0]["consumer_group"]) == (True, "g")
        now[0] = (RUNNING, busy("waiting"))
        ill = tidemill("status", config)
        assert ill.returncode == ExitCode.REMOTE
        assert "  PROBLEM: engine 0 is not running: waiting (start 1)" in ill.stdout


def test_trigger_hosts_are_well_if_they_run_or_stand_by() -> None:
    host = {"pid": 7, "list": "/l.yaml", "waits_for": None, "running": 3, "store": "open", "streams": []}
    holder = {"process": 9, "host": "h", "list": "/l.yaml", "since": "now"}

    assert complete(host)["healthy"]
    assert complete({**host, "waits_for": holder, "store": None})["healthy"]
    assert complete({**host, "store": None})["problems"] == ["the host is starting"]
    assert complete({**host, "store": "down"})["problems"] == ["the store cannot be reached"]
    assert complete({"worker": "w", "pid": 7, "error": "no"})["problems"] == ["no"]
    served = {**host, "metrics": "http://h:1", "web": "http://h:2/?key=k"}
    assert describe_report(complete(served)).splitlines() == [
        "trigger host of /l.yaml (process 7): running",
        "  triggers      3",
        "  store         open",
        "  web           http://h:2/?key=k",
        "  metrics       http://h:1/metrics",
    ]
    standby = describe_report(complete({**served, "waits_for": holder}))
    assert "standing by; process 9 on h" in standby
    assert "  web           http://h:2/?key=k" in standby


def test_what_others_said_cannot_control_the_terminal() -> None:
    waits = msgspec.structs.replace(busy(), waits={"sinks.kafka.out": "no\x1b[2J\nanswer"})
    said = describe_report(
        {**build_report(settings(), "w", RUNNING, waits, 1.0), "pid": 7, "problems": ["bad\x1b]0;title\x07"]}
    )
    holder = {"process": 9, "host": "h\x1b[1m", "list": "/l.yaml", "since": "now"}
    host = {"pid": 7, "list": "/l.yaml", "waits_for": holder, "running": 3, "store": None, "streams": []}

    assert r"no\x1b[2J\nanswer" in said
    assert r"PROBLEM: bad\x1b]0;title\x07" in said
    assert r"process 9 on h\x1b[1m runs the list" in describe_report(complete(host))


def test_a_list_of_triggers_is_told_from_a_configuration(tmp_path: Path) -> None:
    specs, config = tmp_path / "list.yaml", tmp_path / "tidemill.yaml"
    specs.write_text("- {name: a, classpath: x.Y}\n")
    config.write_text("kafka: {source_topic: t}\n")

    assert is_trigger_list(specs)
    assert not is_trigger_list(config)
    assert not is_trigger_list(tmp_path / "missing.yaml")


@pytest.mark.usefixtures("folder")
def test_a_release_at_the_moment_of_a_stop_is_answered_with_why_it_cannot_be() -> None:
    class Stopping:
        @property
        def actions(self) -> Any:
            return self

        def release(self) -> list[dict[str, Any]]:
            raise RemoteError("the link to the engines is closed")

    pipeline = Pipeline(Handler(), settings=settings())
    pipeline._found_by = settings().kafka
    pipeline._linked.live = Stopping()  # type: ignore[assignment]
    with pipeline._open_desk(settings(), "w"):
        (report,) = release_brakes(settings().kafka)

    assert describe_release(report) == f"worker w (process {os.getpid()}): the link to the engines is closed"
