"""Files of tests that run side by side, as pytest shows and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants, is_running

CONFTEST = """
from tests.side_by_side import SideBySide

def pytest_configure(config):
    config.pluginmanager.register(SideBySide(2, None))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([os.getcwd(), str(Path("src").resolve())])
    # Plugins that these tests do not need take longer to import than the tests take.
    env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE,
        # A shell starts what runs behind it with SIGINT ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    said = process.communicate(timeout=100)[0]
    return process.returncode, said


def test_all_files_run_in_two_processes_and_what_fails_is_shown_with_its_output(folder: Path) -> None:
    for name in "ab":
        (folder / f"test_{name}.py").write_text(f"""
import os, time
from pathlib import Path

def test_meets_the_other():
    Path("{name}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not (Path("a").exists() and Path("b").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)

def test_fails_in_one():
    print("this is", "{name}")
    assert "{name}" == "a"
""")

    code, said = run(folder)

    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "test_a.py .." in said
    assert "test_b.py .F" in said
    assert "this is b" in said
    assert "this is a" not in said
    assert "1 failed, 3 passed" in said
    assert (folder / "a").read_text() != (folder / "b").read_text()


def test_what_is_to_run_alone_runs_after_all_else(folder: Path) -> None:
    (folder / "test_first.py").write_text("""
from pathlib import Path

def test_one():
    Path("one").touch()
""")
    (folder / "test_second.py").write_text("""
from pathlib import Path
import pytest

@pytest.mark.alone
def test_alone():
    assert Path("one").exists() and Path("other").exists()

def test_other():
    Path("other").touch()
""")

    code, said = run(folder)

    assert (code, "3 passed" in said) == (pytest.ExitCode.OK, True), said


def test_a_test_that_ends_its_process_fails_and_other_files_run(folder: Path) -> None:
    (folder / "test_ends.py").write_text(
        "import os\n\ndef test_ends():\n    os._exit(7)\n\ndef test_never():\n    pass\n"
    )
    for name in "abc":
        (folder / f"test_{name}.py").write_text("def test_runs():\n    pass\n")

    code, said = run(folder)

    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "test_ends.py::test_ends" in said
    assert "the process of this test ended with 7; the other tests of its file did not run" in said
    assert "1 failed, 3 passed" in said


def test_after_a_failure_nothing_more_begins_if_that_is_asked_for(folder: Path) -> None:
    for number in range(300):
        (folder / f"test_{number}.py").write_text("def test_fails():\n    assert 0\n")

    code, said = run(folder, "-x")

    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "stopping after " in said
    assert said.count("FAILED ") < 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_and_what_tests_have_started(folder: Path, number: signal.Signals) -> None:
    for name in "ab":
        (folder / f"test_{name}.py").write_text(f"""
import subprocess, time
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def server():
    process = subprocess.Popen(["sleep", "1000"])
    yield
    process.kill()
    process.wait()
    Path("ended-{name}").touch()

def test_waits(server):
    Path("{name}").touch()
    time.sleep(1000)
""")
    process = start(folder)
    wait_until(lambda: (folder / "a").exists() and (folder / "b").exists())
    tree = find_descendants(process.pid)

    process.send_signal(number)

    said = process.communicate(timeout=60)[0]
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert not any(map(is_running, tree)), said
    assert (folder / "ended-a").exists()
    assert (folder / "ended-b").exists()


def test_a_killed_run_leaves_workers_that_end_with_their_test(folder: Path) -> None:
    for name in "ab":
        (folder / f"test_{name}.py").write_text(f"""
import time
from pathlib import Path

def test_waits():
    Path("{name}").touch()
    while not Path("go").exists():
        time.sleep(0.01)

def test_never():
    Path("never").touch()
""")
    process = start(folder)
    wait_until(lambda: (folder / "a").exists() and (folder / "b").exists())
    tree = find_descendants(process.pid)

    process.kill()
    process.wait()
    (folder / "go").touch()

    wait_until(lambda: not any(map(is_running, tree)), what="the end of all processes")
    assert not (folder / "never").exists()
