"""A process that the user's code forks does not keep alive what ends with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.until import wait_until

from tidemill.runtime.process.parent_pipes import keep_from_forks
from tidemill.runtime.process.table import find_marked
from tidemill.spark.session.jvm import JvmOutput, end, launch


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """Fork a process that does nothing until the block ends, as `multiprocessing` would."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.write(told, b"x")  # after what happens at a fork
        while True:
            signal.pause()
    try:
        os.read(ready, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_jvm_ends_although_a_forked_process_lives(tmp_path: Path) -> None:
    (tmp_path / "connection").touch()  # it listens: its guard has nothing to do
    jvm = launch(["cat"], os.environ, tmp_path, tmp_path / "connection", JvmOutput())
    with forked():
        end(jvm)
    assert jvm.returncode == 0  # else it was killed


def test_the_parent_keeps_its_pipes_and_closed_ones_are_no_harm() -> None:
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as closed,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as used,
        subprocess.Popen(["true"]) as without,
    ):
        for process in (closed, used, without):
            keep_from_forks(process)
        assert closed.stdin is not None
        closed.stdin.close()
        with forked():
            pass
        assert subprocess.run(["true"], preexec_fn=lambda: None, check=False).returncode == 0
        assert used.communicate(b"said") == (b"said", None)


def test_a_guarded_process_ends_with_a_killed_parent_although_a_forked_process_lives(tmp_path: Path) -> None:
    mark = f"PARENT_PIPES_TEST={os.getpid()}-{tmp_path.name}"
    script = """
        import os, signal, subprocess
        from tidemill.runtime.process.guarded import Guarded
        environ = {**os.environ, **dict([os.environ["MARK"].split("=")])}
        guarded = Guarded(["sleep", "1000"], output=subprocess.DEVNULL, env=environ)
        child = os.fork()
        if child:
            print(child, flush=True)
        signal.pause()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, env={**os.environ, "MARK": mark}
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait_until(lambda: find_marked(mark))
            parent.kill()
            parent.wait()
            wait_until(lambda: not find_marked(mark))
        finally:
            os.kill(child, signal.SIGKILL)
