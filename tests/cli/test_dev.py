"""`tidemill run --dev`: a broker where none is, and new code at every save."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import prepared
from tests.jsonl import read_lines
from tests.runtime.metrics.asking import scrape
from tests.until import wait_until

from tidemill.cli.init import create_project
from tidemill.cli.pipelines.dev import DevFiles, find_free_address, importing_again, list_topics
from tidemill.cli.pipelines.run import run
from tidemill.config.settings import Settings
from tidemill.core.errors import HandlerError
from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.process.exitcode import ExitCode

MAIN = "from tidemill.cli.main import main; main()"


# -- the broker ----------------------------------------------------------------------------------------------------


def test_an_address_of_this_machine_where_nobody_answers_is_free() -> None:
    port = free_port()

    assert find_free_address(f"localhost:{port}") == port
    assert find_free_address(f"127.0.0.1:{port}, localhost:{port}") == port


@pytest.mark.parametrize("brokers", ["kafka.example:9092", "localhost:1,kafka.example:9092", "localhost", "10.0.0.1:1"])
def test_other_machines_are_left_alone(brokers: str) -> None:
    assert find_free_address(brokers) is None


def test_an_address_where_somebody_answers_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert find_free_address(f"localhost:{free_port()},localhost:{taken}") is None


def test_all_topics_of_the_pipeline_on_these_brokers_are_listed() -> None:
    settings = Settings.model_validate(
        {
            "kafka": {"source_topic": "in"},
            "sinks": {"kafka": {"a": {"topic": "out"}, "b": {"topic": "away", "brokers": "elsewhere:9092"}}},
        }
    )

    assert list_topics(settings) == {"in": 4, "in_dlq": 1, "out": 4}
    settings.dlq.brokers = "elsewhere:9092"
    assert list_topics(settings) == {"in": 4, "out": 4}


# -- the code ------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose handler is spread over a module, a package and a folder without `__init__.py`."""
    for name in ("rules", "spread"):
        (tmp_path / name).mkdir()
    (tmp_path / "rules" / "__init__.py").write_text("from rules.words import WORD\n")
    (tmp_path / "rules" / "words.py").write_text("WORD = 'old'\n")
    (tmp_path / "spread" / "more.py").write_text("MORE = 'old'\n")
    (tmp_path / "dev_project.py").write_text(
        "import tidemill, rules\nfrom spread import more\n\n\nclass H(tidemill.Handler[str, str]):\n"
        "    said = rules.WORD + more.MORE\n\n    async def arrange(self, messages, pending):\n        return []\n"
    )
    (tmp_path / "c.yaml").write_text("sinks: {filesystem: {out: {base_path: output}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def test_every_module_of_the_project_is_imported_again(project: Path) -> None:
    files = DevFiles("dev_project:H", Path("c.yaml"))
    assert files.load()[0].said == "oldold"

    (project / "rules" / "words.py").write_text("WORD = 'new'\n")
    (project / "spread" / "more.py").write_text("MORE = 'new'\n")
    (project / "c.yaml").write_text("sinks: {filesystem: {out: {base_path: elsewhere}}}\n")

    handler, settings = files.load()
    assert handler.said == "newnew"
    assert settings.sinks.filesystem["out"].base_path == "elsewhere"


def test_modules_of_others_are_not_imported_again(project: Path) -> None:
    files = DevFiles("dev_project:H", Path("c.yaml"))
    files.load()
    tidemill, installed = sys.modules["tidemill"], sys.modules["structlog"]

    files.load()

    assert (sys.modules["tidemill"], sys.modules["structlog"]) == (tidemill, installed)


def test_after_a_failed_import_the_modules_are_those_that_they_were(project: Path) -> None:
    files = DevFiles("dev_project:H", Path("c.yaml"))
    files.load()
    before = {name: sys.modules[name] for name in ("dev_project", "rules", "rules.words", "spread", "spread.more")}
    (project / "rules" / "words.py").write_text("WORD = 'new'\nraise SystemExit(3)\n")

    with pytest.raises(HandlerError, match="importing the module 'dev_project' failed"):
        files.load()

    assert {name: sys.modules[name] for name in before} == before


def test_an_interrupted_import_leaves_the_modules_too(project: Path) -> None:
    DevFiles("dev_project:H", Path("c.yaml")).load()
    before = sys.modules["dev_project"]

    with pytest.raises(KeyboardInterrupt), importing_again():
        assert "dev_project" not in sys.modules
        raise KeyboardInterrupt

    assert sys.modules["dev_project"] is before


def test_a_save_changes_the_fingerprint_wherever_the_module_is(project: Path) -> None:
    files = DevFiles("dev_project:H", Path("c.yaml"))
    files.load()
    seen = {files.fingerprint()}

    for name in ("dev_project.py", "rules/words.py", "spread/more.py", "c.yaml"):
        (project / name).write_text((project / name).read_text() + "\n")
        seen.add(files.fingerprint())

    assert len(seen) == 5


#: What takes time before the pipeline is made.
STEPS = ("tidemill.spark.session.early.launched_early", "tidemill.cli.pipelines.dev.dev_broker")


def test_what_is_saved_while_the_command_starts_is_no_longer_what_was_imported(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DevFiles] = []
    saved = iter(range(100))

    @contextlib.contextmanager
    def save(*_: object) -> Iterator[None]:
        (project / "rules" / "words.py").write_text(f"WORD = 'new{next(saved)}'\n")
        yield

    class Ended(Exception):
        """The command has come as far as this test needs it."""

    def pipeline(*_: object, files: DevFiles, **__: object) -> None:
        made.append(files)
        raise Ended

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in STEPS:
        monkeypatch.setattr(name, contextlib.nullcontext)
    monkeypatch.setattr("tidemill.spark.pipeline.Pipeline", pipeline)
    monkeypatch.setattr("tidemill.cli.pipelines.run.reporting", contextlib.nullcontext)
    for name in STEPS:
        with pytest.raises(Ended):
            run("dev_project:H", Path("c.yaml"), dev=True)
        assert made[-1].imported == made[-1].fingerprint()
        with monkeypatch.context() as patch, pytest.raises(Ended):
            patch.setattr(name, save)
            run("dev_project:H", Path("c.yaml"), dev=True)
        assert made[-1].imported != made[-1].fingerprint()


# -- all of it -----------------------------------------------------------------------------------------------------


class DevRun:
    """A `tidemill run --dev` of a new project, on a port where no broker is."""

    def __init__(self, folder: Path) -> None:
        create_project(folder)
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        port = free_port()
        self.env = {
            **clean,
            "TIDEMILL_KAFKA__BROKERS": f"localhost:{port}",
            "TIDEMILL_SPARK__ENGINES": "2",
            "TIDEMILL_METRICS__PORT": f"{free_port()}",
            "TIDEMILL_DEBUG__ENABLED": "false",
            "WORKER_ID": f"dev-{port}",
        }
        self.sent = 0
        self.process: prepared.Forked | None = None

    def start(self) -> None:
        arguments = ["run", "tidemill.yaml", "--handler", "handler:Capitals", "--dev"]
        code = f"import os; os.setsid(); {MAIN}"
        with (self.folder / "log.txt").open("wb") as log:
            self.process = prepared.start(arguments, cwd=self.folder, env=self.env, code=code, stdout=log, stderr=log)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def wait_for(self, text: str) -> None:
        def said() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            return text in self.log()

        wait_until(said, 90, what=lambda: f"{text!r} in {self.log()}", pause_seconds=0.05)

    def change(self, old: str, new: str) -> None:
        """Save the handler as editors do: by a new file in the place of the old one."""
        path = self.folder / "handler.py"
        text = path.read_text()
        assert old in text
        path.with_name("handler.py~").write_text(text.replace(old, new))
        path.with_name("handler.py~").replace(path)

    def configure(self, old: str, new: str) -> None:
        path = self.folder / "tidemill.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def max_executors(self) -> list[float]:
        """Return what the metrics say about each engine."""
        address = f"http://127.0.0.1:{self.env['TIDEMILL_METRICS__PORT']}"
        return list(scrape(address)["tidemill_executor_pool_max"].values())

    def send(self, count: int = 20) -> list[str]:
        lines = [f"line {self.sent + n}" for n in range(count)]
        self.sent += count
        done = prepared.run(["send", "lines"], cwd=self.folder, env=self.env, stdin="\n".join(lines).encode())
        assert done.returncode == 0, done.stderr
        return lines

    def results(self) -> list[dict[str, str]]:
        path = self.folder / "output" / "results.jsonl"
        return read_lines(path)

    def processed(self, lines: list[str]) -> set[str]:
        """Wait for the results of these lines, and return them without their numbers."""
        wait_until(lambda: set(lines) <= {row["line"] for row in self.results()}, 60, what=self.log)
        return {row["capitals"].split()[0] for row in self.results() if row["line"] in lines}


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[DevRun]:
    run = DevRun(tmp_path / "capitals")
    yield run
    if run.process is not None and run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_saved_code_replaces_the_running_one_and_nothing_is_lost_or_repeated(dev: DevRun) -> None:
    dev.start()
    dev.wait_for("engine connected")
    assert dev.processed(dev.send()) == {"LINE"}

    before = len(dev.log())
    dev.change('["a-z", "A-Z"]', '["a-z", "b-za"]')
    lines = dev.send(200)  # while it is replaced
    dev.wait_for("the new code is running")
    assert dev.processed(lines) <= {"LINE", "mjof"}
    assert dev.processed(dev.send()) == {"mjof"}
    assert "partitions revoked" not in dev.log()[before:], "its engines take the places in the group over"

    dev.configure("executor:", "executor:\n  max_executors: 7")
    wait_until(lambda: dev.max_executors() == [7, 7], 60, what=dev.log)

    dev.change("class Capitals(", "class Capitals((")
    dev.wait_for("cannot be loaded")
    assert "SyntaxError" in dev.log()
    assert dev.processed(dev.send()) == {"mjof"}

    dev.change("class Capitals((", "class Capitals(")
    dev.wait_for("match the running code again")
    dev.change(
        "    async def arrange(",
        "    async def on_ready(self, config, sinks):\n        1 / 0\n\n    async def arrange(",
    )
    dev.wait_for("the previous code starts again")
    assert dev.processed(dev.send()) == {"mjof"}

    reloads = dev.log().count("code saved; ")
    dev.change("        1 / 0\n", "        pass\n")
    wait_until(lambda: dev.log().count("code saved; ") > reloads, what=dev.log)
    assert dev.process is not None
    os.killpg(dev.process.pid, signal.SIGINT)
    assert dev.process.wait(60) == ExitCode.OK, dev.log()
    counts = Counter(row["line"] for row in dev.results())
    assert counts == Counter(f"line {n}" for n in range(dev.sent))
    assert dev.log().count("starting Spark") == 1


TRANSFORMING = """
from tidemill import FilePayload, Handler


class Capitals(Handler):
    async def transform(self, messages):
        lines = [message.value.decode() for message in messages]
        return [FilePayload(path="results.jsonl", data={"line": line, "capitals": line.upper()}) for line in lines]
"""


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(240)
def test_saved_code_without_tasks_replaces_that_with_tasks_and_the_other_way_round(dev: DevRun) -> None:
    path = dev.folder / "handler.py"
    arranging = path.read_text()
    dev.start()
    dev.wait_for("engine connected")
    assert dev.processed(dev.send()) == {"LINE"}

    for n, code in enumerate([TRANSFORMING, TRANSFORMING.replace("upper()", "title()"), arranging], 1):
        path.write_text(code)
        lines = dev.send(200)  # while it is replaced
        wait_until(lambda n=n: dev.log().count("the new code is running") == n, 60, what=dev.log)
        assert dev.processed(lines) <= {"LINE", "Line"}
        assert dev.processed(dev.send()) == {"Line" if "title" in code else "LINE"}

    assert dev.process is not None
    os.killpg(dev.process.pid, signal.SIGINT)
    assert dev.process.wait(60) == ExitCode.OK, dev.log()
    assert Counter(row["line"] for row in dev.results()) == Counter(f"line {n}" for n in range(dev.sent))


@pytest.mark.kafka
def test_ctrl_c_while_the_broker_starts_ends_the_command_and_the_broker(dev: DevRun) -> None:
    dev.start()
    dev.wait_for("starting Apache Kafka")
    assert dev.process is not None

    dev.process.send_signal(signal.SIGTERM)

    assert dev.process.wait(60) == ExitCode.OK, dev.log()
    assert find_free_address(dev.env["TIDEMILL_KAFKA__BROKERS"]) is not None
