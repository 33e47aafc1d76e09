"""`tidemill demo`: a real Kafka, a real Spark and a real access log, from scratch to a checked result.

All files of a run are in one folder: the broker's data, the configuration, the output files, and the topics as JSON
lines. The settings come from the example's file alone: environment variables for a real cluster must not affect a
demonstration. The pipeline runs in the main thread, as its signal handlers require; a second thread watches the
committed offsets and finally drains the pipeline.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import confluent_kafka as ck
import msgspec
import yaml
from rich.console import Console

import tidemill
from tidemill.cli.demo import check as demo_check
from tidemill.cli.demo.phases import Phases
from tidemill.cli.demo.view import format_progress, show_live, show_summary
from tidemill.cli.pipelines.handlers import load_handler
from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.letter import Letter
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.files.folders import create_folder
from tidemill.runtime.kafka.topic_reader import TopicReader
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.spark.pipeline import Pipeline

ItemT = TypeVar("ItemT")

PARTITIONS = 4
DEFAULT_FOLDER = Path("demo-output")
_MARKER = ".tidemill-demo"
_OWN = ("kafka", "output", "topics", "recordings", "tidemill.yaml")
#: Give up if nothing is committed for this long.
_NO_PROGRESS_SECONDS = 120.0
#: Window summaries may arrive after the last commit.
_SETTLE_SECONDS = 15.0


def find_example() -> Path:
    """Return the folder of the example, which every installation has.

    Raises:
        ConfigError: The installation lacks the example.
    """
    folder = (Path(tidemill.__file__).parent / "examples" / "access_log").resolve()
    if not (folder / "pipeline.py").is_file():
        raise ConfigError(f"the example is missing from this installation ({folder}); reinstall tidemill")
    return folder


def run_demo(*, keep: bool = False, directory: Path | None = None, console: Console | None = None) -> int:
    """Run the demonstration and return its exit code: 0 only if every number is right.

    Args:
        keep: Keep the broker and the pipeline running after the summary, until Ctrl-C.
        directory: The folder for all files; None: `demo-output` in the current folder. Files of an earlier run are
            replaced; a folder with other files is rejected.
        console: The console for all output.

    Raises:
        ConfigError: The folder cannot be used, or there is no Java.
        RemoteError: The broker did not start.
    """
    # By default rich would colour every number in a sentence.
    console = console or Console(highlight=False)
    with open_folder(directory or DEFAULT_FOLDER) as folder:
        phases = Phases(PARTITIONS)
        broker = EmbeddedBroker(folder / "kafka", progress=lambda text: console.print(f"[dim]{text}[/dim]"))
        with broker:
            phases.end("Kafka")
            demo = _Demo(folder, broker.bootstrap, console, phases, keep=keep)
            demo.prepare(broker)
            phases.end("topics")
            return demo.run()


@contextmanager
def open_folder(path: Path) -> Iterator[Path]:
    """Create a folder, or empty the folder of an earlier demo, and lock it."""
    folder = path.resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; choose another with --dir")
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARKER).exists():
        raise ConfigError(f"{folder} has files that are not from a demo; choose another folder with --dir")
    create_folder(folder)
    with (folder / _MARKER).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"a demo is running in {folder}; stop it, or choose another folder with --dir") from error
        for name in _OWN:
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        yield folder


class _Demo:
    """One run: its folder, its topics, its pipeline, and the thread that watches them."""

    def __init__(self, folder: Path, bootstrap: str, console: Console, phases: Phases, *, keep: bool) -> None:
        self.phases = phases
        self.folder = folder
        self.bootstrap = bootstrap
        self.console = console
        self.keep = keep
        self.settings = _write_settings(folder, bootstrap)
        self.lines = demo_check.read_lines(find_example() / "access.log.gz")
        self.expected = demo_check.count_directly(self.lines, PARTITIONS)
        self.ended = threading.Event()
        self.finished = False
        self.verdict: int | None = None
        self.failure: str | None = None
        handler = load_handler("pipeline:AccessLog", find_example())
        self.pipeline = Pipeline(handler, settings=self.settings)

    @property
    def source_topic(self) -> str:
        return self.settings.kafka.source_topic

    @property
    def result_topic(self) -> str:
        topic: str = self.settings.sinks.kafka["results"].topic
        return topic

    def prepare(self, broker: EmbeddedBroker) -> None:
        """Create the topics and fill the source topic."""
        broker.create_topic(self.source_topic, PARTITIONS)
        broker.create_topic(self.result_topic, PARTITIONS)
        fill_topic(self.bootstrap, self.source_topic, self.lines)
        self.console.print(f"{len(self.lines):,} lines of an access log are in topic {self.source_topic}")

    def run(self) -> int:
        """Run the pipeline until everything is committed; check and show the result."""
        started = time.monotonic()
        watcher = threading.Thread(target=self._watch, name="tidemill-demo", daemon=True)
        watcher.start()
        try:
            code = self.pipeline.run(tell=False)
        finally:
            self.ended.set()
            watcher.join(_SETTLE_SECONDS)
        seconds = time.monotonic() - started
        if self.failure is not None:
            self.console.print(redact_text(self.failure), style="red", markup=False)
        self.pipeline.tell_failure()
        if code not in (ExitCode.OK, ExitCode.STOPPED):
            return int(code)
        if self.failure is not None:
            return int(ExitCode.INTERNAL)
        if not self.finished:
            self.console.print("stopped before everything was committed")
            return ExitCode.STOPPED
        if self.verdict is None:
            self.verdict = self._conclude(seconds)
        return self.verdict

    def _watch(self) -> None:
        """Show progress until every offset is committed; then drain, or with `keep` show the summary."""
        started = time.monotonic()
        try:
            self.finished = self._follow()
            if self.finished and self.keep:
                self._wait_for_windows()
                self.verdict = self._conclude(time.monotonic() - started)
                self.console.print("Everything keeps running until Ctrl-C.")
                return
        except Exception as error:
            self.failure = f"watching the pipeline failed: {error!r}"
        if not self.ended.is_set():
            self.pipeline.drain()

    def _follow(self) -> bool:
        """Return True once everything is committed, False if the pipeline ended or makes no progress."""
        total, last, moved = len(self.lines), 0, time.monotonic()
        group = self.settings.kafka.consumer_group
        with TopicReader(self.bootstrap, group) as reader, show_live(self.console, total) as show:
            while not self.ended.wait(0.25):
                done = self._count_committed(reader)
                show(done, self._format_progress())
                self.phases.follow(self.pipeline.progress())
                if done >= total:
                    self.phases.end("messages")
                    return True
                if done != last:
                    last, moved = done, time.monotonic()
                elif time.monotonic() - moved > _NO_PROGRESS_SECONDS:
                    self.failure = (
                        f"nothing was committed for {_NO_PROGRESS_SECONDS:g} s: {self._format_progress()}; run the "
                        f"demo again; if it fails again, report it with {self.folder / 'kafka' / 'broker.log'}"
                    )
                    return False
        return False

    def _count_committed(self, reader: TopicReader) -> int:
        try:
            return sum(max(offset, 0) for offset in reader.committed(self.source_topic).values())
        except ck.KafkaException:
            return 0  # the group has no coordinator yet; if that persists, it counts as a stall

    def _format_progress(self) -> str:
        return format_progress(self.pipeline.progress())

    def _wait_for_windows(self) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and not self.ended.is_set():
            found = {check.name: check for check in demo_check.check(self.expected, self._read_outputs())}
            if found["lines in window summaries"].ok:
                return
            time.sleep(0.2)

    def _read_outputs(self) -> demo_check.Outputs:
        with TopicReader(self.bootstrap, self.settings.kafka.consumer_group) as reader:
            reports = [message.value() or b"" for message in reader.read(self.result_topic)]
            letters = [message.value() or b"" for message in reader.read(self.settings.dlq_topic)]
            committed = reader.committed(self.source_topic)
        for topic, values in ((self.result_topic, reports), (self.settings.dlq_topic, letters)):
            target = self.folder / "topics" / f"{topic}.jsonl"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(b"".join(value + b"\n" for value in values))
        output = Path(self.settings.sinks.filesystem["output"].base_path)
        return demo_check.Outputs(
            reports=[msgspec.json.decode(value, type=demo_check.DemoResult) for value in reports],
            outcomes=_read_lines(output / "messages.jsonl", demo_check.DemoOutcome),
            windows=_read_lines(output / "windows.jsonl", demo_check.DemoWindow),
            letters=[msgspec.json.decode(value, type=Letter) for value in letters],
            committed=committed,
        )

    def _conclude(self, seconds: float) -> int:
        outputs = self._read_outputs()
        checks = demo_check.check(self.expected, outputs)
        show_summary(self.console, self.expected, outputs)
        self.console.print(f"Pipeline: {len(outputs.reports)} tasks in {seconds:.1f} s, including Spark's start.")
        width = self.console.width if self.console.is_terminal else sys.maxsize
        waited = textwrap.fill(
            self.phases.describe(), width, initial_indent="Waited for:     ", subsequent_indent=" " * 16
        )
        self.console.print(waited, soft_wrap=True)
        self._show_paths()
        wrong = [check for check in checks if not check.ok]
        for check in wrong:
            self.console.print(f"[red]WRONG: {check.name}: {check.found:,}, must be {check.expected:,}[/red]")
        if not wrong:
            self.console.print(f"[green]All {len(checks)} numbers agree with a direct count of the input.[/green]")
        return 1 if wrong else 0

    def _show_paths(self) -> None:
        here = Path.cwd()
        folder = self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        out = folder / "output"
        self.console.print(f"Per line:       {out / 'messages.jsonl'}", soft_wrap=True)
        self.console.print(f"Per window:     {out / 'windows.jsonl'}", soft_wrap=True)
        self.console.print(f"Topics:         {folder / 'topics'} (copies; Kafka's data: kafka)", soft_wrap=True)
        self.console.print(f"Configuration:  {folder / 'tidemill.yaml'}", soft_wrap=True)
        if self.keep:
            self.console.print(f"Kafka:          {self.bootstrap}", soft_wrap=True)
            if self.pipeline.web_address is not None:
                self.console.print(f"Web UI:         {self.pipeline.web_address}", soft_wrap=True)
            if self.pipeline.metrics_address is not None:
                self.console.print(f"Metrics:        {self.pipeline.metrics_address}/metrics", soft_wrap=True)


def fill_topic(bootstrap: str, topic: str, lines: Sequence[bytes]) -> None:
    """Write the lines to the partitions in turn, in order.

    Raises:
        RemoteError: The broker did not confirm all lines.
    """
    failed: list[ck.KafkaError] = []

    def note_failure(error: ck.KafkaError | None, message: ck.Message) -> None:
        if error is not None:
            failed.append(error)

    # The producer retries by itself while a new broker is not ready, and reports final failures.
    settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "log_level": 0}
    producer = ck.Producer(settings)
    for number, line in enumerate(lines):
        producer.produce(topic, line, partition=number % PARTITIONS, on_delivery=note_failure)
    if producer.flush(60.0) or failed:
        reason = failed[0].str() if failed else "no confirmation within 60 s"
        raise RemoteError(f"filling topic {topic} failed: {reason}")


def _write_settings(folder: Path, bootstrap: str) -> Settings:
    """Save and return the example's configuration with this run's broker and folder."""
    document = yaml.safe_load((find_example() / "tidemill.yaml").read_text())
    document["kafka"]["brokers"] = bootstrap
    document["sinks"]["filesystem"]["output"]["base_path"] = str(folder / "output")
    document["debug"] = {**document.get("debug", {}), "db_dir": str(folder / "recordings")}
    (folder / "tidemill.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return Settings.model_validate(document)


def _read_lines(path: Path, kind: type[ItemT]) -> list[ItemT]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]
