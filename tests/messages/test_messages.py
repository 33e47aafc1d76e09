"""Every message that a user can see for a mistake is in `tests/messages.txt`, where a person can read them in a row.

TIDEMILL_WRITE_MESSAGES=1 pytest tests/messages rewrites the file.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.messages.collecting import Collector, read_sections, write_sections
from tests.messages.configurations import ARGUMENTS, FILES, HANDLERS, LISTS, SPECS, TRIGGERS, VARIABLES
from tests.messages.payloads import ACTIONS, PAYLOADS, RESULTS, SINKS, TASK_FIELDS, TASKS
from typer.testing import CliRunner

from tidemill.cli.doctor.checks import Cluster, check_program, check_sink
from tidemill.cli.doctor.folder_checks import CheckedFolder, check_folder
from tidemill.cli.main import app
from tidemill.cli.pipelines.handlers import load_handler
from tidemill.cli.topics.send import read_key
from tidemill.config.loading import load_settings
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.config.settings import Settings
from tidemill.core.ranges import check_order, parse_position
from tidemill.pipeline.checks import check_action, check_collect_result, check_tasks
from tidemill.pipeline.delivery.routing import Router
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.runtime.sockets.ports import listen
from tidemill.services.triggerer.lists.checking import check_list
from tidemill.sinks.base import Sink
from tidemill.sinks.build import build_sink
from tidemill.sinks.fields import build_type_check
from tidemill.spark.preflight import make_handler, refuse_letter_files, refuse_no_sinks
from tidemill.testing import run_handler

FILE = Path(__file__).parents[1] / "messages.txt"
REWRITE = bool(os.environ.get("TIDEMILL_WRITE_MESSAGES"))

Compare = Callable[[str], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules of mistakes, without TIDEMILL_* variables; what they change is restored at the end."""
    for name in [name for name in os.environ if name.startswith("TIDEMILL_")]:
        monkeypatch.delenv(name)
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("XDG_RUNTIME_DIR", str(tmp_path / "run"))):
        monkeypatch.setenv(name, value)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TRIGGERS)
    (tmp_path / "handlers_here.py").write_text(HANDLERS)
    (tmp_path / "broken.py").write_text("def x(:\n")
    (tmp_path / "raising.py").write_text("\n1 / 0\n")
    (tmp_path / "incomplete.py").write_text("import no_such_dependency\n")
    (tmp_path / "no_handlers.py").write_text("x = 5\n")
    path, modules, logs = sys.path[:], set(sys.modules), structlog.get_config()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield tmp_path
    sys.path[:] = path
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.configure(**logs)
    for name in set(sys.modules) - modules:
        if name in ("mine", "handlers_here", "broken", "raising", "incomplete", "no_handlers"):
            del sys.modules[name]


@pytest.fixture
def collector(folder: Path) -> Collector:
    return Collector(folder)


def compare(title: str, collector: Collector) -> None:
    """Compare a section with the file, or write it there."""
    sections = read_sections(FILE)
    if REWRITE:
        write_sections(FILE, {**sections, title: collector.text})
        return
    assert collector.text == sections.get(title), (
        f"the messages of {title!r} are not those of {FILE.name}; read them, and write the file with "
        "TIDEMILL_WRITE_MESSAGES=1 pytest tests/messages"
    )


def test_wrong_configurations(folder: Path, collector: Collector) -> None:
    def load(text: str) -> Any:
        (folder / "tidemill.yaml").write_text(text + "\n")
        return load_settings("tidemill.yaml", {})

    collector.provoke((text, lambda text=text: load(text)) for text in FILES)
    for variables in VARIABLES:
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        collector.provoke([(shown, lambda variables=variables: load_settings(None, variables))])
    (folder / "latin1.yaml").write_bytes(b"kafka: {brokers: '\xe4:1'}\n")
    collector.provoke(
        [
            ("a file that is not UTF-8", lambda: load_settings("latin1.yaml", {})),
            ("a folder instead of a file", lambda: load_settings(folder, {})),
            ("no sink", lambda: refuse_no_sinks(Settings())),
            ("dlq.path", lambda: refuse_letter_files(Settings.model_validate({"dlq": {"path": "letters"}}))),
        ]
    )
    compare("Wrong configurations", collector)


def test_wrong_handlers(folder: Path, collector: Collector) -> None:
    collector.provoke((spec, lambda spec=spec: make_handler(load_handler(spec, folder))) for spec in SPECS)
    collector.provoke(
        [("a class that needs arguments, in code", lambda: make_handler(sys.modules["handlers_here"].Needs))]
    )
    compare("Wrong handlers", collector)


def test_wrong_lists_of_triggers(folder: Path, collector: Collector) -> None:
    def check(text: str) -> Any:
        (folder / "spec.yaml").write_text(text + "\n")
        return check_list(folder / "spec.yaml")

    collector.provoke((text, lambda text=text: check(text)) for text in LISTS)
    for classpath, kwargs in ARGUMENTS:
        entry = f"- {{name: x, classpath: tidemill.triggers.builtin.{classpath}, kwargs: {{{kwargs}}}}}"
        collector.provoke([(f"{classpath.rpartition('.')[2]}: {kwargs}", lambda entry=entry: check(entry))])
    compare("Wrong lists of triggers", collector)


def test_wrong_returns_of_hooks(collector: Collector) -> None:
    router = Router({"kafka": {"a": None, "b": None}, "filesystem": {"a": None, "b": None}})  # type: ignore[dict-item]

    def route(value: Any) -> Any:
        result = check_collect_result(value)
        assert result is not None
        return router.route(result)

    collector.provoke((f"arrange: {tasks!r}", lambda tasks=tasks: check_tasks("arrange", tasks)) for tasks in TASKS)
    collector.provoke(
        (f"ExecutorTask: {fields}", lambda fields=fields: ExecutorTask(**{"task_id": "t", **fields}))
        for fields in TASK_FIELDS
    )
    changes = ("args", ()), ("precomputed", None)
    collector.provoke(
        (f"task.{name} = {value}", lambda name=name, value=value: setattr(ExecutorTask("t"), name, value))
        for name, value in changes
    )
    collector.provoke(
        [
            ("del task.args", lambda: delattr(ExecutorTask("t"), "args")),
            ("task.labels['a'] = 'b'", lambda: operator.setitem(ExecutorTask("t").labels, "a", "b")),
            ("PrecomputedResult(stdout=5)", lambda: PrecomputedResult(stdout=5)),
        ]
    )
    collector.provoke((f"on_error: {action!r}", lambda action=action: check_action(action)) for action in ACTIONS)
    collector.provoke((repr(result), lambda result=result: route(result)) for result in RESULTS)
    compare("Wrong returns of hooks", collector)


def test_wrong_payloads(collector: Collector) -> None:
    def encode(sink: Sink, payload: Any) -> Any:
        build_type_check(type(payload))(payload)
        return sink.encode(payload)

    settings = Settings.model_validate({"sinks": SINKS})
    for kind, payloads in PAYLOADS.items():
        sink = build_sink(settings, kind, next(iter(SINKS[kind])))
        collector.provoke((repr(each)[:150], lambda each=each, sink=sink: encode(sink, each)) for each in payloads)
    compare("Wrong payloads", collector)


def test_what_is_not_there(folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.cli.doctor.checks._ASK_SECONDS", 1.0)
    settings = Settings.model_validate({"sinks": {**SINKS, "filesystem": {"files": {"base_path": "mine.py"}}}})
    cluster = Cluster(KafkaSettings(brokers="127.0.0.1:1"), "", {}, "kafka.brokers")
    collector.provoke([("no broker", cluster.check), ("no broker: its topic", lambda: cluster.check_topic("t", "x"))])
    # A broker is asked for that long; the others refuse at once, however busy the machine is.
    monkeypatch.setattr("tidemill.cli.doctor.checks._ASK_SECONDS", 60.0)
    for kind in ("filesystem", "postgres", "mongo", "http", "redis"):
        name = next(iter(SINKS[kind]))
        collector.provoke([(f"no {kind}", lambda kind=kind, name=name: check_sink(settings, kind, name))])
    (folder / "file").touch()
    collector.provoke(
        (path, lambda path=path: check_folder(CheckedFolder("cache.path", path))) for path in ("file", "file/below")
    )
    collector.provoke([("no program", lambda: check_program(ExecutorSettings(binary_path="no-such-program")))])
    elsewhere = MetricsSettings(host="192.0.2.1")
    collector.provoke([("the address of another machine", lambda: listen(elsewhere, is_chosen=False))])
    compare("What is not there", collector)


def test_failed_tasks(collector: Collector) -> None:
    from tests.messages.failing_handler import Failing

    run = run_handler(Failing, ["missing", "refused", "exit", "slow", "loud", "arrange", "tasks", "payload"])
    for letter in sorted(run.dead_letters, key=lambda letter: str(letter.sources[0].value)):
        text = re.sub(r"\(\S*/failing_handler", "(.../failing_handler", letter.error)
        collector.add(f"{letter.sources[0].value} ({letter.kind.value})", text)
    compare("Failed tasks, as their dead letters say it", collector)


COMMANDS = (
    "",
    "rum",
    "run",
    "run --handler",
    "run --handler handlers_here:Good --bogus",
    "run missing.yaml --handler handlers_here:Good",
    "run one.yaml two.yaml --handler handlers_here:Good",
    "run --handler handlers_here:Nothing",
    "backfill --handler handlers_here:Good --from 0",
    "backfill missing.yaml --handler handlers_here:Good --from 0 --outcomes out",
    "backfill --handler handlers_here:Good --from 0 --outcomes out --range-messages 0",
    "release",
    "config",
    "config check missing.yaml",
    "config check wrong.yaml",
    "config check folders.yaml",
    "config check",
    "config show wrong.yaml",
    "doctor missing.yaml --jsno",
    "init",
    "init .",
    "init ''",
    "broker --topic a/b",
    "broker --topic a:many",
    "broker --topic a:0",
    "broker --topic a:1000000000",
    "broker --port 99999",
    "init orders --template mongo",
    "send",
    "send a/b",
    "send orders missing.txt",
    "send orders --rate 0",
    "consume a/b",
    "consume orders --from end",
    "consume orders --from noon",
    "trace",
    "trace orders/3/7",
    "trace orders:3:7 --key customer-17",
    "trace --key customer-17 --task t-1",
    "trace --label tenant",
    "trace orders:3:7 missing.yaml",
    "trace orders:3:7 memory.yaml",
    "trace orders:3:7 recordings.yaml",
    "record",
    "record clean recordings.yaml --before noon",
    "record merge --to merged missing",
    "record merge --to ./merged .",
    "record export recordings.yaml",
    "triggers",
    "triggers run",
    "triggers check",
    "triggers check missing.yaml",
    "triggers check .",
    "triggers list missing.yaml",
    "triggers list spec.yaml",
    "triggers list spec.yaml --config store.yaml",
    "triggers events spec.yaml --after x",
    "triggers events spec.yaml --limit 0",
    "triggers streams missing.yaml",
    "triggers streams spec.yaml",
    "tasks elements daily load --state done",
    "tasks clear daily load --index first",
    "tasks mark daily load --as success --index 7-3",
    "dlq list --kind tsk",
    "dlq list --from yesterday",
    "dlq list --from 1h --until 3h",
    "dlq list --id ''",
    "dlq list --limit x",
    "dlq list letters.yaml",
    "dlq stats",
    "dlq show ''",
    "dlq redrive --from 2h",
    "dlq redrive --to no/topic",
    "dlq redrive --rate 0",
)


def test_mistakes_on_the_command_line(folder: Path, collector: Collector) -> None:
    (folder / "handler.py").touch()
    (folder / "wrong.yaml").write_text("kafka: {brokerz: x}\nexecutor: {max_executors: many}\n")
    (folder / "recordings.yaml").write_text("debug: {db_dir: recordings}\n")
    (folder / "memory.yaml").write_text("debug: {db_dir: ''}\n")
    (folder / "folders.yaml").write_text(
        "kafka: {source_topic: t, client_config: {no.such.key: 1}}\nexecutor: {binary_path: no-such-program}\n"
        "sinks: {filesystem: {out: {base_path: wrong.yaml}}}\nhistory: {path: /proc/history}\n"
    )
    (folder / "store.yaml").write_text("store: {url: 'mysql://u:hunter2@h/d'}\n")
    (folder / "letters.yaml").write_text("dlq: {path: letters}\n")
    (folder / "spec.yaml").write_text("[]\n")
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command), prog_name="tidemill")
        assert "Traceback" not in result.output
        if "Usage:" in result.output and "Error" not in result.output:
            continue  # help
        collector.add(f"tidemill {command}".strip(), f"{result.output}(exit code {result.exit_code})")
    collector.provoke(
        (f"tidemill send orders --key id, and the line {line!r}", lambda line=line: read_key(line.encode(), "id"))
        for line in ("", "[1]", '{"name": "ann"}', '{"id": "\\ud800"}')
    )
    for start, end in (("x", "5"), ("2026-05-01", "latest"), ("1960-01-01T00:00:00Z", "latest"), ("7", "3")):
        collector.provoke(
            [
                (
                    f"tidemill backfill --from {start} --to {end}",
                    lambda start=start, end=end: check_order(
                        parse_position(start, "--from"), parse_position(end, "--to")
                    ),
                )
            ]
        )
    compare("Mistakes on the command line", collector)
