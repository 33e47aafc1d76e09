"""Processes are found by where they descend from and by their marks, and ended ones are not taken for running."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tidemill.runtime.process.table import (
    find_children,
    find_descendants,
    find_marked,
    is_running,
    read_command,
    read_parent,
    read_state,
)

NOBODY = 2**30


@pytest.fixture
def mark() -> str:
    return f"TEST_MARK={uuid.uuid4().hex}"


@pytest.fixture
def shell(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A shell, and a `sleep` below it."""
    name, _, value = mark.partition("=")
    script = "sleep 60 & echo; wait"
    process = subprocess.Popen(["sh", "-c", script], env={**os.environ, name: value}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    for pid in [*find_descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_descendants_are_found_and_the_process_itself_is_not_among_them(shell: subprocess.Popen[bytes]) -> None:
    (sleeper,) = find_descendants(shell.pid)
    assert read_parent(sleeper) == shell.pid
    assert shell.pid in find_children(os.getpid())
    assert sleeper not in find_children(os.getpid())
    assert {shell.pid, sleeper} <= set(find_descendants(os.getpid()))


def test_marked_processes_are_found_with_their_command_lines(shell: subprocess.Popen[bytes], mark: str) -> None:
    found = find_marked(mark)
    assert set(found) == {shell.pid, *find_descendants(shell.pid)}
    assert found[shell.pid] == read_command(shell.pid)
    assert found[shell.pid].startswith("sh -c sleep 60")
    assert find_marked(mark[:-1]) == {}


def test_a_process_that_has_ended_is_not_running() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert is_running(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_state(process.pid) == "Z"
    assert not is_running(process.pid)
    process.wait()
    assert not is_running(process.pid)


def test_nothing_is_known_of_a_process_that_is_not_there() -> None:
    assert (read_state(NOBODY), read_parent(NOBODY), read_command(NOBODY)) == ("", None, "")
    assert find_descendants(NOBODY) == []
