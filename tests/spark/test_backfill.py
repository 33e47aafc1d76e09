"""Backfill over a real topic: all of it, once, resumable, and nothing that a live pipeline has is touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka.admin import AdminClient
from tests import prepared
from tests.jsonl import read_lines
from tests.until import wait_until

from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.table import find_marked, read_parent
from tidemill.testing.kafka import committed_offsets, consume

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parent.parent.parent


class Site:
    """A topic with messages in it, and a folder."""

    def __init__(self, broker: Any, folder: Path, partitions: int = 2, **options: Any) -> None:
        self.broker = broker
        self.folder = folder
        self.topic = f"bf-{uuid.uuid4().hex[:8]}"
        self.partitions = partitions
        self.outcomes = folder / "outcomes"
        self.config_path = folder / "tidemill.yaml"
        self.fed = 0
        self.running: list[subprocess.Popen[bytes]] = []
        broker.create_topic(self.topic, partitions=partitions, **options)

    def feed(self, count: int, **fields: Any) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap, "linger.ms": 5})
        for n in range(self.fed, self.fed + count):
            value = json.dumps({"n": n, **fields}).encode()
            producer.produce(self.topic, value, key=b"%d" % n, partition=n % self.partitions)
            if n % 10_000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0
        self.fed += count

    def config(self, **more: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kafka": {"brokers": self.broker.bootstrap, "source_topic": self.topic, "consumer_group": self.topic},
            "sinks": {"filesystem": {"out": {"base_path": str(self.folder / "out")}}},
            "spark": {"master": "local[2]"},
        }
        for section, values in more.items():
            config.setdefault(section, {}).update(values)
        self.config_path.write_text(yaml.safe_dump(config))
        return config

    def seen(self) -> Counter[int]:
        path = self.folder / "out" / "out.jsonl"
        return Counter(line["n"] for line in read_lines(path))

    def rows(self) -> list[dict[str, Any]]:
        return [row for part in sorted(self.outcomes.glob("part-*")) for row in pq.read_table(part).to_pylist()]

    def parts(self) -> list[str]:
        return sorted(part.name for part in self.outcomes.glob("part-*"))

    def arguments(self, handler: str, *more: str) -> list[str]:
        handler = f"tests.spark.backfill_handlers:{handler}"
        return ["backfill", str(self.config_path), "--handler", handler, "--outcomes", str(self.outcomes), *more]

    def run(self, handler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        return prepared.run_text(self.arguments(handler, *arguments), cwd=self.folder, env=env, timeout=120)

    def start(self, handler: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", *self.arguments(handler, *arguments)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "BACKFILL_MARK": self.topic},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        """End whatever is left, at once."""
        while left := marked(self.topic):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.running:
                process.poll()


@pytest.fixture
def site(embedded_kafka: Any, tmp_path: Path) -> Iterator[Site]:
    place = Site(embedded_kafka, tmp_path)
    yield place
    place.end()


def read_summary(said: str) -> dict[str, Any]:
    """Return the summary, wherever it is: on a busy machine, Spark's end may be logged after it."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (summary,) = [line for line in lines if line["event"] == "summary"]
    return summary


def marked(mark: str) -> dict[int, str]:
    """Return the command of every living process that was started with this in its environment."""
    return find_marked(f"BACKFILL_MARK={mark}")


def engines(mark: str) -> list[int]:
    """Return the Spark Python workers: children of the daemon that forks them, but not what these are forking."""
    daemon = "-m tidemill.spark.engine.daemon"
    forked = {pid: read_parent(pid) for pid, command in marked(mark).items() if daemon in command}
    return [pid for pid, parent in forked.items() if parent in forked and forked[parent] not in forked]


def test_a_topic_is_done_once_in_ranges_finer_than_its_partitions(site: Site) -> None:
    site.feed(1_200)
    site.config()
    done = site.run("Known", "--from", "earliest", "--range-messages", "250")
    assert done.returncode == ExitCode.OK, done.stderr
    assert site.seen() == Counter(range(1_200))
    rows = site.rows()
    assert Counter((row["partition"], row["offset"]) for row in rows) == Counter((n % 2, n // 2) for n in range(1_200))
    assert {row["status"] for row in rows} == {"done"}
    assert len(site.parts()) == 2 * 3
    summary = read_summary(done.stderr)
    assert (summary["messages_done"], summary["dead_letters"]) == (1_200, {})
    assert not list(site.outcomes.glob("_part-*"))
    admin = AdminClient({"bootstrap.servers": site.broker.bootstrap})
    groups = {found.group_id for found in admin.list_consumer_groups().result(60).valid}
    assert not {name for name in groups if name.startswith(site.topic)}, "a group was joined"

    site.config(executor={"order_by": "key"})
    split = site.run("Known", "--from", "earliest", "--whole-partitions")
    assert split.returncode == ExitCode.CONFIG, "that plan has split them already"
    assert "a new outcomes folder" in split.stderr


def leave_a_gap(site: Site, first: int) -> None:
    """Let the live pipeline be at offset 77 of partition 0, which begins with this one by now."""
    live = ck.Consumer({"bootstrap.servers": site.broker.bootstrap, "group.id": site.topic})
    live.commit(offsets=[ck.TopicPartition(site.topic, 0, 77)], asynchronous=False)
    live.close()
    admin = AdminClient({"bootstrap.servers": site.broker.bootstrap})
    for future in admin.delete_records([ck.TopicPartition(site.topic, 0, first)]).values():
        future.result(60)


@pytest.mark.long
def test_a_backfill_between_offsets_is_recorded_with_its_counts_and_failures_and_found_like_a_pipeline(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_DEBUG__ENABLED", "true")
    site.feed(300)
    site.feed(2, fail=True)
    site.feed(2)
    db = site.folder / "recordings"
    site.config(debug={"db_dir": str(db)}, executor={"max_retries": 1})
    leave_a_gap(site, 20)
    done = site.run("Flawed", "--from", "10", "--to", "151", "--range-messages", "100")
    assert done.returncode == ExitCode.OK, done.stderr
    assert read_summary(done.stderr)["gap"] == 10
    places = {(row["partition"], row["offset"]) for row in site.rows()}
    assert places == {*((0, n) for n in range(20, 151)), *((1, n) for n in range(10, 151))}
    assert committed_offsets(site.broker.bootstrap, site.topic, site.topic) == {0: 77, 1: -1}

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200"}
        return prepared.run_text([*words, str(site.config_path)], cwd=site.folder, env=env, timeout=60)

    listed = json.loads(ask("record", "list", "--json").stdout)
    assert (listed["bounded"], listed["live"], listed["messages"], listed["tasks"]) == (True, False, 2, 4)
    traced = ask("trace", f"{site.topic}:1:150")
    assert traced.returncode == ExitCode.OK, traced.stderr
    assert f"bounded run {listed['recording']}, range " in traced.stdout.splitlines()[0]
    assert "exit code 3" in traced.stdout
    assert "commit" not in traced.stdout, "nothing is committed"
    assert ask("trace", f"{site.topic}:1:20").returncode == ExitCode.NOTHING_FOUND, "it went well"
    reader = Reader(db)
    assert sum(point.consumed for point in reader.read_counts(0, 2**52).points) == 272
    (ended,) = reader.find_events(EventQuery(kinds=("run_ended",))).rows
    assert (ended.event.text, ended.event.data["messages_done"], ended.event.data["dead_lettered"]) == ("done", 272, 2)


@pytest.mark.long
def test_a_backfill_without_tasks_has_reports_letters_and_traces_and_its_letters_go_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_DEBUG__ENABLED", "true")
    site.feed(300)
    site.feed(2, fail=True)
    history = site.folder / "history"
    site.config(
        debug={"db_dir": str(site.folder / "recordings")},
        history={"path": str(history)},
        executor={"commit": "window"},
    )
    done = site.run("Lined", "--from", "earliest", "--range-messages", "100")
    assert done.returncode == ExitCode.OK, done.stderr
    assert site.seen() == Counter(range(300))
    assert Counter(row["status"] for row in site.rows()) == {"done": 300, "rejected": 2}
    summary = read_summary(done.stderr)
    assert (summary["messages_done"], summary["dead_letters"]) == (302, {"transform": 2})
    reported = [row for part in history.rglob("*.parquet") for row in pq.read_table(part).to_pylist()]
    assert Counter((row["status"], row["tasks"]) for row in reported) == {("done", 0): 300, ("rejected", 0): 2}

    def ask(*words: str) -> str:
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "200"}
        found = prepared.run_text([*words], cwd=site.folder, env=env, timeout=60)
        assert found.returncode == ExitCode.OK, found.stdout + found.stderr
        return found.stdout

    failed = ask("trace", f"{site.topic}:1:150", str(site.config_path))
    assert "transform" in failed
    assert "no such customer" in failed
    ask("dlq", "redrive", str(site.config_path), "--kind", "transform")
    values = [json.loads(record.value())["n"] for record in consume(site.broker.bootstrap, site.topic, 304)]
    assert Counter(values) == Counter([*range(302), 300, 301]), "each letter is a message again"


@pytest.mark.long
def test_a_killed_backfill_is_resumed_without_doing_finished_ranges_again(site: Site) -> None:
    site.feed(3_000)
    site.config(executor={"max_executors": 8})
    killed = site.start("Slow", "--from", "earliest", "--range-messages", "300")
    wait_until(lambda: len(site.parts()) >= 3, 90, what="some ranges are finished")
    killed.kill()
    killed.wait(60)
    before = site.parts()
    assert 3 <= len(before) < 10
    # Engines whose driver is gone drain by themselves; what they finish meanwhile counts.
    wait_until(lambda: not marked(site.topic), 60, what="every process is gone")
    finished = site.rows()
    done = site.run("Slow", "--from", "earliest", "--range-messages", "300")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "resuming the backfill" in done.stderr
    assert Counter((row["partition"], row["offset"]) for row in site.rows()) == Counter(
        (n % 2, n // 2) for n in range(3_000)
    )
    seen = site.seen()
    assert set(seen) == set(range(3_000))
    again = {n for n, times in seen.items() if times > 1}
    assert not again & {row["offset"] * 2 + row["partition"] for row in finished}, "finished ranges were reprocessed"
    nothing = site.run("Slow", "--from", "earliest")
    assert (nothing.returncode, site.seen()) == (ExitCode.OK, seen)
    other = site.run("Slow", "--from", "7")
    assert other.returncode == ExitCode.CONFIG
    assert "holds the backfill of topic" in other.stderr


@pytest.mark.long
def test_sigterm_keeps_what_is_done_and_a_killed_engine_costs_nothing(site: Site) -> None:
    site.feed(900)
    config = site.config(executor={"max_executors": 8})
    assert config["spark"]["master"] == "local[2]"
    stopped = site.start("Slower", "--from", "earliest", "--whole-partitions", "--range-messages", "450")
    wait_until(lambda: len(site.seen()) > 100, 90, what="work under way")
    victim, survivor = wait_until(lambda: len(found := engines(site.topic)) == 2 and found, 60, what="both engines")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: set(engines(site.topic)) - {victim, survivor}, 60, what="another engine in its place")
    count = len(site.seen())
    wait_until(lambda: len(site.seen()) > count + 50, 60, what="work goes on")
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == ExitCode.STOPPED, site.log()
    assert "the backfill was stopped; run it again" in site.log()
    assert not marked(site.topic)
    part_way = Counter((row["partition"], row["offset"]) for row in site.rows())
    assert 0 < len(part_way) < 900
    seen = site.seen()
    done = site.run("Known", "--from", "earliest", "--whole-partitions")
    assert done.returncode == ExitCode.OK, done.stderr
    assert set(site.seen()) == set(range(900))
    assert Counter((row["partition"], row["offset"]) for row in site.rows()) == Counter(
        (n % 2, n // 2) for n in range(900)
    )
    again = {n for n, times in (site.seen() - seen).items() if n in seen}
    assert not again & {offset * 2 + partition for partition, offset in part_way}


@pytest.mark.long
def test_an_engine_that_hangs_is_killed_and_its_part_is_done_again(site: Site) -> None:
    site.config(executor={"max_executors": 8})
    site.feed(2_000)
    run = site.start("Slow", "--from", "earliest")
    wait_until(lambda: len(site.seen()) > 20, 60, what="work under way")
    os.kill(wait_until(lambda: engines(site.topic), 60, what="engines")[0], signal.SIGSTOP)
    assert run.wait(120) == ExitCode.OK
    assert "an engine hangs; killing it" in site.log()
    assert set(site.seen()) == set(range(2_000))
    wait_until(lambda: not marked(site.topic), 60, what="no process left")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "yesterday"), "the start (--from) 'yesterday' is neither an offset nor a time"),
        (("--from", "2026-05-01T00:00:00"), "has no time zone"),
        (("--from", "10", "--to", "5"), "the end (--to) is not after the start (--from)"),
        (("--from", "latest"), "the end (--to) is not after the start (--from)"),
    ],
)
def test_positions_that_make_no_sense_are_refused_before_anything_starts(
    site: Site, arguments: tuple[str, ...], said: str
) -> None:
    site.config()
    done = site.run("Known", *arguments)
    assert (done.returncode, site.outcomes.exists()) == (ExitCode.CONFIG, False)
    assert said in done.stderr.splitlines()[-1]


def test_what_is_between_may_be_empty(site: Site) -> None:
    site.config()
    empty = site.run("Known", "--from", "earliest")
    assert empty.returncode == ExitCode.OK
    assert read_summary(empty.stderr)["messages_done"] == 0


@pytest.mark.long  # tests/spark/bounded/test_dataframe.py has it of a backfill in a session
def test_an_engine_that_cannot_start_is_named(site: Site) -> None:
    site.config()
    site.feed(10)
    done = site.run("Unready", "--from", "0", "--to", "10", "--outcomes", str(site.folder / "second"))
    assert done.returncode == ExitCode.HANDLER, done.stderr
    assert "on_ready raised LookupError: no such table" in done.stderr.splitlines()[-1]
