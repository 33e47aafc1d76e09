"""`tidemill demo`: its folder rules, its feeding, and the whole run as a user sees it, without a terminal."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.until import wait_until

from tidemill.cli.demo import check, view
from tidemill.cli.demo import demo as demo_module
from tidemill.cli.demo.demo import PARTITIONS, fill_topic, open_folder
from tidemill.cli.demo.phases import Phases
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.log.setup import tell_failure
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import consume, unique_name


def test_what_an_earlier_run_left_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    with open_folder(tmp_path / "demo") as folder:
        (folder / "output").mkdir()
        (folder / "output" / "messages.jsonl").write_text("old")
        (folder / "tidemill.yaml").write_text("old")
        (folder / "notes.txt").write_text("mine")
    with open_folder(tmp_path / "demo") as folder:
        assert not (folder / "output").exists()
        assert not (folder / "tidemill.yaml").exists()
        assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    with pytest.raises(ConfigError, match=r"files that are not from a demo.*--dir"), open_folder(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"), open_folder(tmp_path / "file"):
        pass
    assert (tmp_path / "output").exists()


def test_two_demos_at_once_need_two_folders(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path / "demo"),
        pytest.raises(ConfigError, match="a demo is running"),
        open_folder(tmp_path / "demo"),
    ):
        pass


@pytest.mark.kafka
def test_lines_are_fed_round_the_partitions_in_order(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name(), PARTITIONS)
    lines = [str(number).encode() for number in range(1000)]
    fill_topic(embedded_kafka.bootstrap, topic, lines)
    for message in consume(embedded_kafka.bootstrap, topic, 1000):
        assert message.value() == lines[message.offset() * PARTITIONS + message.partition()]


class FailingPipeline:
    """Ends with an error at once, and tells it as a pipeline does."""

    def __init__(self, *_: object, **__: object) -> None:
        self.error = RemoteError("topic [/lost] is gone, password=" + "hunter2")

    def run(self, *, tell: bool = True) -> ExitCode:
        if tell:
            self.tell_failure()
        return ExitCode.REMOTE

    def tell_failure(self) -> None:
        tell_failure("the pipeline failed", self.error)

    def drain(self) -> None:
        pass


def test_an_error_is_told_once_as_it_is_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> bool:
        raise ValueError("broker [/red] said password=" + "hunter2")

    monkeypatch.setattr("tidemill.runtime.log.setup.is_for_people", lambda: True)  # whatever configured the logs before
    monkeypatch.setattr(demo_module, "Pipeline", FailingPipeline)
    monkeypatch.setattr(demo_module._Demo, "_follow", fail)
    phases = Phases(PARTITIONS)

    code = demo_module._Demo(tmp_path, "b:9092", Console(width=200), phases, keep=False).run()

    told = capsys.readouterr()
    assert code == ExitCode.REMOTE
    assert told.err == "error: topic [/lost] is gone, password=***\n"
    assert "topic" not in told.out
    assert "watching the pipeline failed: ValueError('broker [/red] said password=***" in told.out
    assert "hunter2" not in told.out


def look_around(address: str) -> None:
    """Ask the web UI of the demo for what the demo has counted."""
    base, _, query = address.partition("/?")
    with httpx.Client(base_url=base, timeout=60) as client:
        assert client.get("/").status_code == 303
        assert client.get(f"/login?{query}").status_code == 200
        # Engines look at the lag once a second.
        wait_until(lambda: client.get("/api/v1/overview").json()["lag"]["messages"] == 0, 60)
        overview = client.get("/api/v1/overview").json()
        assert overview["done"] == 10_000
        (letter,) = client.get("/api/v1/letters").json()["rows"]
        assert (letter["kind"], letter["messages"]) == ("parse", ["access-log:2:2224"])

        def find_story() -> Any:
            answer = client.get("/api/v1/messages/access-log/2/2224")
            # Its letter is known a second before its row.
            return answer.json() if answer.status_code == 200 and answer.json()["stories"] else None

        story = wait_until(find_story)
        assert story["stories"][0]["message"]["status"] == "rejected"
        rows = client.get("/api/v1/messages", params={"topic": "access-log", "limit": 5000}).json()["rows"]
        assert len({(row["partition"], row["offset"]) for row in rows}) == 5000
        probe_messages(client, base)
        assert client.get("/api/v1/overview").json()["done"] == 10_000, "probes leave nothing behind"
        assert len(client.get("/api/v1/letters").json()["rows"]) == 1


def probe_messages(client: httpx.Client, base: str) -> None:
    """Have an engine probe a message that it dead-lettered, and the one before it."""
    csrf = re.findall(r'data-csrf="([^"]+)"', client.get("/").text)
    headers = {"X-CSRF-Token": csrf[0], "Origin": base}

    def probe(offset: int) -> dict[str, Any]:
        order = {"recorded": True, "partition": 2, "offset": offset}
        answer = client.post("/api/v1/probe", json=order, headers=headers)
        assert answer.status_code == 202, answer.text
        wait_until(lambda: client.get("/api/v1/probe").json()["ended_at"] is not None, 60)
        found: dict[str, Any] = client.get("/api/v1/probe").json()
        assert found["problem"] == ""
        report: dict[str, Any] = found["report"]
        return report

    bad, good = probe(2224), probe(2223)
    assert (bad["status"], [letter["kind"] for letter in bad["letters"]]) == ("failed", ["parse"])
    assert "not in the combined log format" in bad["stages"][0]["trace"]["text"]
    assert good["status"] == "done", good
    assert [stage["hook"] for stage in good["stages"]][:2] == ["deserialize_message", "arrange"]
    assert sum(good["sinks"].values()) == len(good["payloads"]) > 0
    action = client.get("/api/v1/events", params={"kind": "action"})
    assert action.json()["rows"][0]["text"] == "probe message access-log:2:2223"


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Queue[str]]]:
    """Start the command; yield it and a queue of the lines that it prints."""
    program = Path(sys.executable).with_name("tidemill")
    command = [str(program), "demo", "--dir", str(folder), *options]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines: Queue[str] = Queue()
        assert process.stdout is not None
        Thread(target=lambda: [lines.put(line) for line in process.stdout or ()], daemon=True).start()
        try:
            yield process, lines
        finally:
            process.kill()


def read_until(lines: Queue[str], pattern: str, seconds: float) -> str:
    """Return everything printed up to a line that matches."""
    seen, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, seen):
        try:
            seen += lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except Empty:
            raise AssertionError(f"no {pattern!r} in {seconds:g} s in:\n{seen}") from None
    return seen


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.timeout(400)
def test_the_demo_ends_with_numbers_that_agree_with_the_input_and_with_keep_runs_on_until_ctrl_c(
    tmp_path: Path,
) -> None:
    with demo(tmp_path / "demo", "--keep") as (process, lines):
        output = read_until(lines, r"keeps running|WRONG", 180)
        (address,) = re.findall(r"Kafka: +(127\.0\.0\.1:\d+)", output)
        assert len(consume(address, "access-log_dlq", 1)) == 1
        (web,) = re.findall(r"Web UI: +(http://\S+)", output)
        look_around(web)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "numbers agree" in output
    assert "2,747,282,505" in output
    assert "Offsets committed: 10,000" in output
    assert re.search(r"Dead letter \(parse\) for access-log/\d/\d+: .*not in the combined log format", output)
    assert "Slowest tasks" in output
    seconds = r"\d+\.\d s"
    names = ("Kafka", "topics", "Spark", "engines", "partitions", "messages")
    assert re.search("Waited for: +" + ", ".join(f"{name} {seconds}" for name in names), output)
    assert len((tmp_path / "demo" / "output" / "messages.jsonl").read_text().splitlines()) == 9999
    assert len((tmp_path / "demo" / "topics" / "access-log_dlq.jsonl").read_text().splitlines()) == 1


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.timeout(300)
def test_ctrl_c_in_between_ends_everything_and_shows_no_half_result(tmp_path: Path) -> None:
    with demo(tmp_path / "demo") as (process, lines):
        read_until(lines, r"engines:", 90)
        process.send_signal(signal.SIGINT)
        # The engines drain; by then everything may be done after all.
        output = read_until(lines, r"stopped before everything was committed|numbers agree|WRONG", 60)
        assert process.wait(60) == (130 if "stopped" in output else 0)
    assert "WRONG" not in output


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_of_the_summary_is_cut_on_a_narrow_terminal(width: int) -> None:
    task_id = "status-304-329da67173f0d8641904"
    report = check.DemoResult(task_id, 304, 0, [0], 9_125, 2_735_455_610, 0.2779)
    outputs = check.Outputs([report], [], [], [], {0: 1})
    console = Console(file=io.StringIO(), width=width)
    view.show_summary(console, {(0, 0): check.DemoLine(304, 2_735_455_610)}, outputs)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert "2,735,455,610" in shown
    assert "277.9" in shown
    assert max(map(len, shown.splitlines())) <= width
