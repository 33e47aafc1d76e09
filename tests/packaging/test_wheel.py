"""What is published, as a new user meets it: built, installed without extras, and used without a Java on the PATH."""

from __future__ import annotations

import email
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

import pytest
from tests.packaging.clean import ROOT, CleanEnvironment, lend, list_pins
from tests.until import wait_until

from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.embedded.jars import kafka_lock

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """Return an environment with the wheel in it, what it needs, and the Java of the package index."""
    folder = tmp_path_factory.mktemp("clean")
    environment = CleanEnvironment(folder)
    for package in ("pyspark", "pyarrow"):
        lend(package, environment.venv)
    pins = folder / "pins.txt"
    pins.write_text("\n".join(list_pins(ROOT / "requirements.lock")))
    environment.pip_install("--constraint", pins, wheel)
    environment.pip_install("--require-hashes", "-r", ROOT / "requirements-java.lock")
    assert "no broken requirements" in environment.run("python", "-m", "pip", "check").lower()
    return environment


@pytest.fixture(scope="module")
def project(clean: CleanEnvironment) -> Path:
    clean.run("tidemill", "init", "capitals")
    return clean.home / "capitals"


def test_an_index_accepts_what_is_built(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, timeout=60)


def test_the_metadata_says_what_it_is_and_for_whom(metadata: Message) -> None:
    assert metadata["Author"] == "The tidemill developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"]
    assert "kafka" in (metadata["Keywords"] or "").split(",")
    classifiers = metadata.get_all("Classifier") or []
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11", "Operating System :: POSIX :: Linux"} <= {
        *classifiers
    }


def test_the_long_description_has_no_link_or_picture_that_leads_nowhere(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert "# tidemill" in text
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r"(?:src|href|srcset)=[\"']([^\"']*)", text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "<!--" not in text


def test_the_archives_have_what_the_package_needs(dist: Path, wheel: Path) -> None:
    root = ROOT / "src"
    found = [Path(folder, name) for folder, _, names in os.walk(root / "tidemill", followlinks=True) for name in names]
    needed = {str(file.relative_to(root)) for file in found if "__pycache__" not in file.parts}
    assert {"tidemill/py.typed", "tidemill/examples/access_log/access.log.gz"} <= needed
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert needed <= names
    assert not [name for name in names if name.startswith(("tests", "bench")) or "__pycache__" in name]
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    sources = {f"src/{name}".replace("src/tidemill/examples", "examples") for name in needed}
    assert sources | {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} <= inside
    assert not [name for name in inside if "__pycache__" in name]


def test_the_demo_runs_where_java_comes_from_the_index_and_the_cache_is_empty(clean: CleanEnvironment) -> None:
    assert not (clean.home / ".cache").exists()
    output = clean.run("tidemill", "demo", seconds=600)
    assert "numbers agree with a direct count" in output
    total = kafka_lock().size_bytes / 1e6
    assert re.search(rf"downloading org.apache.kafka\S+ \(once\): [\d.]+ of {total:.1f} MB", output)
    left = [path.name for path in (clean.home / ".cache" / "tidemill" / "jars").iterdir()]
    assert sorted(left) == [".kafka_2.13-4.3.1.lock", "kafka_2.13-4.3.1"]


def test_the_test_of_a_new_project_passes(clean: CleanEnvironment, project: Path) -> None:
    clean.pip_install("pytest", "pytest-asyncio")
    output = clean.run("python", "-m", "pytest", cwd=project)
    assert re.search(r"[1-9]\d* passed", output)


def test_a_trigger_waits_for_a_file(clean: CleanEnvironment) -> None:
    folder = clean.home / "waiting"
    folder.mkdir()
    (folder / "triggers.yaml").write_text(
        "- name: export\n"
        "  classpath: tidemill.triggers.builtin.file.FileTrigger\n"
        "  kwargs: {path: export.csv, poll_seconds: 0.1}\n"
    )
    with background(clean, folder, "tidemill", "triggers", "run", "triggers.yaml") as host:
        (folder / "export.csv").write_text("1,2\n")
        assert host.wait(60) == 0
    (event,) = clean.run("tidemill", "triggers", "events", "triggers.yaml", "--json", cwd=folder).splitlines()
    assert json.loads(event)["trigger"] == "export"
    assert "export.csv" in event


def test_what_commands_import_is_installed_without_extras(clean: CleanEnvironment) -> None:
    modules = (
        "cli.pipelines.backfill",
        "cli.broker",
        "cli.topics.send",
        "spark.bounded.backfill",
        "spark.live.supervisor",
    )
    clean.run("python", "-c", "import " + ", ".join(f"tidemill.{name}" for name in modules))


@pytest.mark.nightly  # above, what the commands need is there; tests/spark/test_backfill.py has what they do
def test_a_backfill_processes_what_a_topic_has(clean: CleanEnvironment, project: Path) -> None:
    port = free_port()
    clean.environ["TIDEMILL_KAFKA__BROKERS"] = f"localhost:{port}"
    with background(clean, project, "tidemill", "broker", "--topic", "lines:2", "--port", str(port)) as broker:
        wait_until(lambda: sends(clean, project), what="the broker answers", pause_seconds=0.5)
        command = ("tidemill", "backfill", "tidemill.yaml", "--handler", "handler:Capitals")
        clean.run(*command, "--from", "earliest", "--outcomes", "outcomes", cwd=project)
        broker.send_signal(signal.SIGINT)
        assert broker.wait(60) == 0
    written = [json.loads(line)["capitals"] for line in (project / "output" / "results.jsonl").read_text().splitlines()]
    assert sorted(written) == ["HELLO", "TIDE MILL"]


def sends(clean: CleanEnvironment, project: Path) -> bool:
    try:
        clean.run("tidemill", "send", "lines", "--config", "tidemill.yaml", cwd=project, stdin="hello\ntide mill\n")
    except AssertionError:
        return False
    return True


@contextmanager
def background(clean: CleanEnvironment, cwd: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that the block ends."""
    with (cwd / "background.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=cwd, env=clean.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    except BaseException:
        print((cwd / "background.log").read_text())
        raise
    finally:
        process.kill()
        process.wait()
