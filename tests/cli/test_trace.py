"""`tidemill trace` and `tidemill record`: what was recorded, from the command line."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.recorder.rows import START, TOPIC, message, messages, task, tasks
from tests.until import wait_until
from typer.testing import CliRunner, Result

from tidemill.cli.main import app
from tidemill.cli.recordings import trace_view
from tidemill.config.loading import load_settings
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.errors import RemoteError
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.pipeline.reports import history
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.queries import MessageQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.sockets.control_socket import ControlThread
from tidemill.runtime.sockets.pipeline_socket import pipeline_socket
from tidemill.spark.live.recording import answer_open, answer_trace
from tidemill.spark.live.run_recorder import RunRecorder

ESCAPE = "\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recording of a worker that has ended."""
    for name in ("TIDEMILL_CONFIG", "TIDEMILL_DEBUG__ENABLED"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "recordings"
    (tmp_path / "pipeline.yaml").write_text(f"debug: {{db_dir: '{folder}'}}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-1") as writer:
        record(writer)
    return folder


def record(writer: RecordWriter) -> None:
    """Record a message that failed, was reprocessed, and then was done; another one is evil."""
    again = START + 60_000_000
    rows = [
        message(7, 3, status="failed", error="exit: exit code #", payloads=0),
        message(7, 3, consumed_at=again, arranged_at=again + 1, tasks_done_at=again + 2, resolved_at=again + 9_000),
        message(8, 3, key=f"{ESCAPE}key\xe9".encode("latin-1")),
    ]
    writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*rows))
    failed = task("t-7", [7], 3, kind="exit", exit_code=3, error=f"no {ESCAPE}user", stderr=b"traceback\nof it")
    ran = task("t-7", [7], 3, queued_at=again + 10, started_at=again + 20, ended_at=again + 30)
    writer.put_rows("e1", 0, 2, RowTable.TASKS, tasks(failed, ran, task("t-8", [8], 3, labels=[("tenant", "beta")])))
    letter = RecordedEvent(START + 7_000 + 9_000, EventKind.DEAD_LETTERED, TOPIC, 3, 7, text="gave up", error_class="x")
    writer.put_events("e1", 0, 3, [letter])


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"NO_COLOR": "1", "COLUMNS": "200"})


def test_the_story_of_a_message_is_a_tree_for_each_time_it_was_processed(folder: Path):
    result = run("trace", "orders:3:7", "pipeline.yaml")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.strip().split("\n\n")
    assert first.splitlines()[0] == "orders:3:7 failed in 10.0 ms, g.host-1, engine 0"
    order = [
        "written to the topic",
        "consumed",
        "arranged",
        "task t-7, try 1 tenant=acme",
        "a dead letter was written",
        "failed: exit: exit code #",
    ]
    places = [first.index(text) for text in order]
    assert places == sorted(places)
    assert "exit code 3" in first
    assert "gave up" in first
    assert "done, 1 payload" in second
    assert "t-7" in second
    assert "gave up" not in second


def test_what_users_wrote_reaches_no_terminal_as_control_characters(folder: Path):
    for place in ("orders:3:7", "orders:3:8"):
        assert "\x1b" not in run("trace", place, "pipeline.yaml").stdout


@pytest.mark.parametrize(
    ("words", "offset"), [(("--key", "customer-7"), 7), (("--task", "t-8"), 8), (("--label", "tenant=beta"), 8)]
)
def test_messages_are_found_by_key_task_and_label(folder: Path, words: tuple[str, str], offset: int):
    result = run("trace", *words, "pipeline.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"orders:3:{offset} ")


def test_a_key_is_found_as_it_was_shown(folder: Path):
    (shown,) = [
        line.removeprefix("key ")
        for line in run("trace", "orders:3:8", "pipeline.yaml").stdout.splitlines()
        if line.startswith("key ")
    ]
    assert shown == r"\x1b[31mkey\xe9"
    assert run("trace", "--key", shown, "pipeline.yaml").stdout.startswith("orders:3:8 ")


def test_a_key_that_was_cut_is_shown_so(folder: Path):
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(9, 3, key=b"k" * 256), message(10, 3, key=b"")))
    assert (
        "kkk ... (only the first 256 bytes of keys are recorded)\n"
        in run("trace", "orders:3:9", "pipeline.yaml").stdout
    )
    assert "an empty key\n" in run("trace", "orders:3:10", "pipeline.yaml").stdout


def test_a_task_and_a_label_that_are_not_utf_8_are_found_as_they_are_stored(folder: Path):
    row = task("\\udcff", [9], 3, labels=[("tenant", "\\udcff")])
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(9, 3)))
        writer.put_rows("e1", 0, 2, RowTable.TASKS, tasks(row))
    for words in (("--task", "\udcff"), ("--label", "tenant=\udcff")):
        result = run("trace", *words, "pipeline.yaml")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("orders:3:9 ")
    assert run("trace", "--task", "none\udcff", "pipeline.yaml").exit_code == 6


def test_json_has_the_story_and_bytes_that_are_not_text(folder: Path):
    result = run("trace", "orders:3:8", "pipeline.yaml", "--json")
    (story,) = json.loads(result.stdout)["messages"][0]["stories"]
    assert story["message"]["offset"] == 8
    assert story["message"]["key"] == "\x1b[31mkey\\xe9"
    assert story["message"]["key_base64"] == "G1szMW1rZXnp"
    assert story["tasks"][0]["labels"] == {"tenant": "beta"}


@pytest.mark.parametrize(
    "words", [("orders:3:999",), ("--key", "none"), ("--task", "none"), ("--label", "tenant=none")]
)
def test_nothing_found_ends_with_6_and_says_what_is_kept(folder: Path, words: tuple[str, ...]):
    result = run("trace", *words, "pipeline.yaml")
    assert result.exit_code == 6
    assert result.stdout == ""
    assert "is not recorded" in result.stderr
    assert "2027-01-15 08:00:00" in result.stderr
    result = run("trace", *words, "pipeline.yaml", "--json")
    assert result.exit_code == 6
    document = json.loads(result.stdout)
    assert document["messages"] == []
    assert document["kept_from_us"] // 1_000_000 == 1_800_000_000


def test_an_empty_folder_says_that_there_is_nothing(folder: Path, tmp_path: Path):
    (tmp_path / "other.yaml").write_text("debug: {db_dir: nowhere}\n")
    result = run("trace", "orders:3:7", "other.yaml")
    assert result.exit_code == 6
    assert "no messages in nowhere" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "write a message as TOPIC:PARTITION:OFFSET"),
        (("orders/3/7",), "not a message; write TOPIC:PARTITION:OFFSET"),
        (("orders:3:7", "pipeline.yaml", "--key", "k"), "either a message or one of"),
        (("--key", "k", "--task", "t"), "write only one"),
        (("--label", "tenant"), "write NAME=VALUE"),
        (("--task", ""), "--task is empty"),
        (("orders:3:7", "missing.yaml"), "does not exist"),
    ],
)
def test_a_wrong_question_is_refused(folder: Path, words: tuple[str, ...], message: str):
    result = run("trace", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_recordings_in_memory_are_asked_of_their_process(folder: Path, tmp_path: Path):
    (tmp_path / "memory.yaml").write_text("debug: {db_dir: ''}\nkafka: {consumer_group: in-memory}\n")
    settings = load_settings("memory.yaml")
    with RecordWriter(settings.debug, "in-memory", "host-1") as writer:
        recorder = RunRecorder()
        recorder.writer = writer
        record(writer)
        wait_until(lambda: writer.statistics.events)

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            return answer_trace(recorder, "in-memory", "host-1", request)

        with ControlThread(pipeline_socket(settings.kafka, "host-1", {"trace": answer})):
            result = run("trace", "orders:3:7", "memory.yaml")
            assert result.exit_code == 0, result.output
            assert result.stdout.startswith("orders:3:7 failed in 10.0 ms, in-memory.host-1, engine 0")
            assert "\x1b" not in run("trace", "--key", "customer-7", "memory.yaml").stdout
            (story,) = json.loads(run("trace", "orders:3:8", "memory.yaml", "--json").stdout)["messages"][0]["stories"]
            assert story["message"]["key_base64"] == "G1szMW1rZXnp"
            nothing = run("trace", "orders:3:999", "memory.yaml")
            assert nothing.exit_code == 6
            assert "2027-01-15" in nothing.stderr
            # A pipeline with another configuration is not asked.
            assert run("trace", "orders:3:8", "pipeline.yaml").stdout.count("orders:3:8") == 1
    assert run("trace", "orders:3:7", "memory.yaml").exit_code == 6
    assert run("record", "list", "memory.yaml").exit_code == 2


def test_a_message_that_a_pipeline_has_not_finished_is_shown_with_its_place(folder: Path):
    (tmp := folder.parent / "live.yaml").write_text(f"debug: {{db_dir: '{folder}'}}\nkafka: {{consumer_group: live}}\n")
    settings = load_settings(tmp)
    stage = MessageStage(stage=OpenStage.BACKOFF, task_id=f"t-{ESCAPE}", attempt=1, attempts=4, next_seconds=9.0)

    def find(topic: str, partition: int, offset: int) -> OpenMessage | None:
        if offset == 13:
            raise RemoteError("engine 0 is silent")
        engine = None if offset == 7 else 0
        return OpenMessage(topic, partition, offset, engine, stage, stage.describe()) if offset != 12 else None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"traces": None} | answer_open(find, request)

    with ControlThread(pipeline_socket(settings.kafka, "host-1", {"trace": answer})):
        result = run("trace", "orders:3:11", "live.yaml")
        assert result.exit_code == 0, result.output
        told = r"orders:3:11 is open, worker host-1, engine 0: task t-\x1b[31m is in backoff: attempt 1 of 4 failed"
        assert result.stdout.startswith(told)
        document = json.loads(run("trace", "orders:3:11", "live.yaml", "--json").stdout)
        assert document["messages"] == []
        (found,) = document["open"]
        assert (found["worker"], found["engine"]) == ("host-1", 0)
        assert (found["stage"]["stage"], found["stage"]["attempt"], "pid" in found["stage"]) == ("back-off", 1, False)
        both = run("trace", "orders:3:8", "live.yaml").stdout
        assert both.startswith("orders:3:8 done")
        assert "orders:3:8 is open, worker host-1" in both
        assert run("trace", "orders:3:12", "live.yaml").exit_code == 6
        silent = run("trace", "orders:3:13", "live.yaml")
        assert silent.exit_code == 6
        assert "cannot be read: engine 0 is silent" in silent.stderr


def test_a_process_whose_recording_is_on_disk_has_nothing_to_add(folder: Path):
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        recorder = RunRecorder()
        recorder.writer = writer
        assert answer_trace(recorder, "g", "host-2", {"query": {"offset": 7}}) == {"traces": None}
    assert answer_trace(None, "g", "host-2", {}) == {"traces": None}


def test_a_wrong_question_to_a_process_is_answered_with_what_is_wrong():
    with RecordWriter(DebugSettings(db_dir=""), "g", "w") as writer:
        recorder = RunRecorder()
        recorder.writer = writer
        assert "not a valid message query" in answer_trace(recorder, "g", "w", {"query": {"offset": "seven"}})["error"]
        assert "not a valid message query" in answer_trace(recorder, "g", "w", {})["error"]


def test_replacements_are_not_counted_as_what_a_message_was_arranged_into(tmp_path: Path):
    with RecordWriter(DebugSettings(db_dir=str(tmp_path / "recordings")), "g", "w") as writer:
        ran = [task("t", [7]), task("t-r1", [7], parent="t"), task("t-r2", [7], parent="t")]
        writer.put_rows("e", 0, 1, RowTable.TASKS, tasks(*ran))
        writer.put_rows("e", 0, 2, RowTable.MESSAGES, messages(message(7, tasks=3)))
    found = Reader(tmp_path / "recordings").trace("orders", 0, 7)
    (text,) = map(trace_view._describe_story, found.stories)
    assert "arranged into 1 task\n" in text


def test_a_message_without_tasks_is_not_said_to_be_arranged(tmp_path: Path):
    with RecordWriter(DebugSettings(db_dir=str(tmp_path / "recordings")), "g", "w") as writer:
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(7, tasks=0, payloads=2)))
    (story,) = Reader(tmp_path / "recordings").trace("orders", 0, 7).stories
    text = trace_view._describe_story(story)
    assert "arrange or transform returned, without tasks for it\n" in text
    assert "done, 2 payloads" in text
    assert "arranged" not in text
    assert "tasks done" not in text


def test_a_damaged_segment_is_named_where_a_key_is_not_found_and_in_the_list(folder: Path):
    for path in folder.rglob("messages-*.parquet"):
        path.write_bytes(path.read_bytes()[:100])
    result = run("trace", "--key", "customer-7", "pipeline.yaml")
    assert result.exit_code == 6, result.output
    assert "messages-000001 is damaged and was skipped" in result.stderr
    info = json.loads(run("record", "list", "pipeline.yaml", "--json").stdout)
    (problem,) = info["problems"]
    assert problem.startswith("messages-000001 is damaged")


def test_recordings_are_listed_with_what_is_in_them(folder: Path):
    result = run("record", "list", "pipeline.yaml")
    assert result.exit_code == 0, result.output
    assert "g.host-1" in result.stdout
    (line,) = run("record", "list", "pipeline.yaml", "--json").stdout.splitlines()
    info = json.loads(line)
    assert (info["messages"], info["tasks"], info["events"], info["live"]) == (3, 3, 1, False)


def test_a_recording_that_is_being_written_is_merged_as_it_is_now(folder: Path, tmp_path: Path):
    merged = tmp_path / "merged"
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        writer.put_rows("e2", 0, 1, RowTable.MESSAGES, messages(message(100)))
        writer.put_events("e2", 0, 2, [RecordedEvent(START, EventKind.ACTION, text="who did it")])
        wait_until(lambda: writer.statistics.events)
        result = run("record", "merge", "--to", str(merged), str(folder), str(folder))
    assert result.exit_code == 0, result.output
    assert "2 recordings copied" in result.stderr
    reader = Reader(merged)
    assert [row.offset for row in reader.find_messages(MessageQuery(offset=100)).rows] == [100]
    assert len(reader.list_failures().groups) == 1
    assert not any(info.problems or info.live for info in reader.list_recordings())
    assert run("record", "merge", "--to", str(folder / "inside"), str(folder)).exit_code == 2
    assert run("record", "merge", "--to", str(merged), str(tmp_path / "nowhere")).exit_code == 2


def test_a_recording_that_is_merged_again_is_brought_up_to_date(folder: Path, tmp_path: Path):
    merged = tmp_path / "merged"

    def merge() -> list[int]:
        result = run("record", "merge", "--to", str(merged), str(folder))
        assert (result.exit_code, result.stderr) == (0, f"2 recordings copied to {merged}\n")
        return sorted(row.offset for row in Reader(merged).find_messages(MessageQuery(worker="host-2")).rows)

    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        for count, offset in enumerate((100, 101), 1):
            writer.put_rows("e2", 0, 2 * offset, RowTable.MESSAGES, messages(message(offset)))
            event = RecordedEvent(START, EventKind.ACTION, text="who did it")
            writer.put_events("e2", 0, 2 * offset + 1, [event])
            wait_until(functools.partial(lambda count: writer.statistics.events == count, count))
            assert merge() == list(range(100, offset + 1))
    assert merge() == [100, 101]
    for path in (folder / "g.host-2").rglob("*.parquet"):
        path.unlink()
    assert merge() == [100, 101], "what retention removed from the source stays in the copy"
    assert [info.events for info in Reader(merged).list_recordings() if info.recording == "g.host-2"] == [2]


def test_the_folder_of_one_worker_is_no_folder_of_recordings(folder: Path, tmp_path: Path):
    result = run("record", "merge", "--to", str(tmp_path / "merged"), str(folder / "g.host-1"))
    assert result.exit_code == 2
    assert "write its parent folder" in result.stderr


def test_a_file_in_place_of_the_folder_to_write_is_refused(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for command in (("merge", "--to", "file", str(folder)), ("export", "--parquet", "file", "pipeline.yaml")):
        result = run("record", *command)
        assert result.exit_code == 2, result.output
        (said,) = result.stderr.splitlines()
        assert said.startswith(f"error: {command[1]} file: this is a file; write the name of a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_clean_removes_what_ended_before_a_time_and_nothing_that_is_written(folder: Path):
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2"):
        assert "0 recordings" in run("record", "clean", "pipeline.yaml").stderr
        dry = run("record", "clean", "pipeline.yaml", "--before", "2100-01-01", "--dry-run")
        assert "1 recording would be removed" in dry.stderr
        assert (folder / "g.host-1").is_dir()
        done = run("record", "clean", "pipeline.yaml", "--before", "2100-01-01")
        assert done.stdout == dry.stdout
        assert "1 recording removed" in done.stderr
        assert [path.name for path in folder.iterdir()] == ["g.host-2"]


def test_messages_are_exported_with_the_columns_of_the_history(folder: Path, tmp_path: Path):
    result = run("record", "export", "--parquet", "out", "pipeline.yaml")
    assert result.exit_code == 0, result.output
    table = pq.read_table(tmp_path / "out")
    assert table.schema.names == history.SCHEMA.names
    assert [str(field.type) for field in table.schema] == [str(field.type) for field in history.SCHEMA]
    assert sorted(table["offset"].to_pylist()) == [7, 7, 8]
    assert set(table["worker"].to_pylist()) == {"host-1"}
    assert table["finished_at"].to_pylist()[0].year == 2027
    assert "0 messages" in run("record", "export", "--parquet", "none", "pipeline.yaml", "--until", "2026-01-01").stderr


def test_a_message_whose_payload_was_refused_is_dead_lettered_and_not_done(folder: Path):
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "host-2") as writer:
        rows = messages(message(50), message(51))
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, rows)
        at = START + 50 * 1000 + 9_000
        letter = RecordedEvent(at, EventKind.DEAD_LETTERED, TOPIC, 0, 50, sink="sinks.kafka.out", text="too large")
        writer.put_events("e1", 0, 2, [letter])
        wait_until(lambda: writer.statistics.rows == 2, 60)
    said = run("trace", f"{TOPIC}:0:50", "pipeline.yaml").stdout
    assert said.startswith(f"{TOPIC}:0:50 dead-lettered in 10.0 ms")
    assert "dead-lettered, 1 payload" in said
    assert run("trace", f"{TOPIC}:0:51", "pipeline.yaml").stdout.startswith(f"{TOPIC}:0:51 done in")
