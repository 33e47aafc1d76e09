"""The warden against real engines that are killed, stopped, or leave properly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.until import LIMIT_SECONDS, slack, wait_until

from tidemill.runtime.process import warden as warden_module
from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.runtime.process.table import is_running, list_processes, read_command
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, Warden, marked

#: Stands for an engine: a warden, children as the executor starts them, then it waits to be killed.
ENGINE = """
import asyncio, os, sys, time
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.tasks.executor import Executor
from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.runtime.process.warden import Warden

async def main():
    engine_id, script, fork = sys.argv[1:4]
    warden = KeptWarden(Warden(engine_id, float(sys.argv[4])))
    warden.start()
    executor = Executor(ExecutorSettings(), engine_id)
    executor.open()
    for _ in range(4):
        executor.start(("sh", "-c", script), b"", {}, 600.0, print)
    if fork == "fork" and os.fork() == 0:
        time.sleep(60)
    print(warden.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class FakeEngine:
    """The stand-in engine in a process of its own."""

    def __init__(self, script: str, *, fork: str = "", grace_seconds: float = 0.0) -> None:
        self.engine_id = f"engine-{time.monotonic_ns()}"
        argv = [sys.executable, "-c", ENGINE, self.engine_id, script, fork, str(grace_seconds)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT_SECONDS)[0]
        self.warden_pid = int(self.process.stdout.readline())

    def wardens(self) -> list[int]:
        """Return the wardens of this engine that are up."""
        found = []
        for pid in list_processes():
            words = read_command(pid).split(" ")
            with contextlib.suppress(OSError):
                if "-S" in words and self.engine_id in words and os.readlink(f"/proc/{pid}/cwd") == "/":
                    found.append(pid)
        return found

    def close(self) -> None:
        for pid in [*marked(self.engine_id), *self.wardens()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., FakeEngine]]:
    engines: list[FakeEngine] = []

    def build(script: str, **options: object) -> FakeEngine:
        engines.append(FakeEngine(script, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_the_children_of_a_killed_engine_die_within_two_seconds(start: Callable[..., FakeEngine]) -> None:
    engine = start("trap '' TERM; setsid sleep 71 & sleep 72 & env -i sleep 73 & sleep 74; sleep 75")
    wait_until(lambda: len(marked(engine.engine_id)) >= 12, what="all children and grandchildren are up")
    children = marked(engine.engine_id)
    engine.process.kill()
    killed_at = time.monotonic()
    wait_until(lambda: not any(map(is_running, children)), what="all of them are gone")
    assert time.monotonic() - killed_at < slack(2)
    wait_until(lambda: not is_running(engine.warden_pid), what="the warden has left too")


def test_a_program_that_a_child_started_without_the_id_and_outside_its_group_dies_with_it(
    start: Callable[..., FakeEngine], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    # One that ignores SIGTERM outlives the child that started it, and with that what tells whose it is.
    engine = start(
        f"setsid env -i sh -c 'trap \"\" TERM; echo $$ >>{pids}; exec sleep 84' & exec sleep 85", grace_seconds=0.3
    )
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4, what="all programs are up")
    started = [int(pid) for pid in pids.read_text().split()]
    assert not set(started) & set(marked(engine.engine_id))
    engine.process.kill()
    try:
        wait_until(lambda: not any(map(is_running, started)), what="all of them are gone")
    finally:
        for pid in filter(is_running, started):
            os.kill(pid, signal.SIGKILL)
    assert not marked(engine.engine_id)


def test_a_fork_of_the_engine_that_holds_the_pipe_does_not_stop_the_warden(
    start: Callable[..., FakeEngine],
) -> None:
    engine = start("sleep 76", fork="fork")
    wait_until(lambda: len(marked(engine.engine_id)) >= 4, what="all children are up")
    engine.process.kill()
    wait_until(lambda: not marked(engine.engine_id), what="all children are gone")


def test_children_may_use_the_grace_that_the_engine_allows(start: Callable[..., FakeEngine], tmp_path: Path) -> None:
    goodbye = tmp_path / "goodbye"
    engine = start(f"trap 'echo bye >> {goodbye}; exit' TERM; sleep 77 & wait", grace_seconds=10.0)
    wait_until(lambda: len(marked(engine.engine_id)) >= 8, what="all children are up")
    engine.process.kill()
    wait_until(lambda: not marked(engine.engine_id), what="all children are gone")
    assert goodbye.read_text() == "bye\n" * 4


def test_the_warden_survives_what_ends_the_engines_terminal_and_group(
    start: Callable[..., FakeEngine],
) -> None:
    engine = start("sleep 78")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(engine.warden_pid, number)
    wait_until(lambda: len(marked(engine.engine_id)) >= 4, what="all children are up")
    os.killpg(engine.process.pid, signal.SIGKILL)
    wait_until(lambda: not marked(engine.engine_id), what="all children are gone")


def test_other_engines_children_are_left_alone(start: Callable[..., FakeEngine]) -> None:
    killed, other = start("exec sleep 79"), start("exec sleep 79")
    wait_until(lambda: marked(killed.engine_id) and len(marked(other.engine_id)) == 4, what="both are up")
    killed.process.kill()
    wait_until(lambda: not is_running(killed.warden_pid), what="the first warden is through")
    assert not marked(killed.engine_id)
    assert len(marked(other.engine_id)) == 4


def test_a_clean_end_ends_programs_that_left_their_group_and_reaps_the_warden() -> None:
    engine_id = f"engine-{time.monotonic_ns()}"
    environ = {ENGINE_ID_VARIABLE: engine_id, "PATH": os.environ["PATH"]}
    warden = Warden(engine_id)
    warden.start()
    # Its parent, the task, has ended.
    task = ["sh", "-c", "trap '' TERM; setsid sleep 80 &"]
    subprocess.run(task, env=environ, start_new_session=True, check=True)
    wait_until(lambda: marked(engine_id), what="the program is up")
    pid = warden.pid
    warden.close()
    assert marked(engine_id) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(pid or -2, os.WNOHANG)


#: Stands for an engine in whose group there is a marked process: one that its task started, and that joined the group.
ENGINE_IN_A_GROUP = """
import os, subprocess, sys, time
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, Warden, marked

engine_id = sys.argv[1]
warden = Warden(engine_id)
warden.start()
subprocess.Popen(["sleep", "83"], env={ENGINE_ID_VARIABLE: engine_id, "PATH": os.environ["PATH"]})
while not marked(engine_id):
    time.sleep(0.01)
warden.close()
print("alive", len(marked(engine_id)))
"""


def test_the_engines_own_group_is_spared_when_a_marked_process_is_in_it() -> None:
    argv = [sys.executable, "-c", ENGINE_IN_A_GROUP, f"engine-{time.monotonic_ns()}"]
    ended = subprocess.run(argv, capture_output=True, start_new_session=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.stdout == b"alive 0\n", ended.stderr


def test_a_warden_that_finds_nothing_at_a_clean_end_leaves_at_once() -> None:
    warden = Warden(f"engine-{time.monotonic_ns()}")
    warden.start()
    pid = warden.pid
    wait_until(lambda: os.readlink(f"/proc/{pid}/cwd") == "/", what="it is up")
    started_at = time.monotonic()
    warden.close()
    assert time.monotonic() - started_at < slack(warden_module.LEAVE_SECONDS / 2)


def test_a_warden_that_was_killed_is_reaped_all_the_same() -> None:
    warden = Warden("engine-x")
    warden.start()
    assert warden.pid is not None
    os.kill(warden.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(warden.pid or 0), what="it is gone")
    warden.close()
    assert warden.pid is None
    warden.close()


async def test_a_warden_that_dies_is_replaced_within_a_second_again_and_again() -> None:
    warden = KeptWarden(Warden(f"engine-{time.monotonic_ns()}"))
    warden.start()
    try:
        for _ in range(3):
            before = warden.pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            killed_at = time.monotonic()
            while warden.pid == before:
                assert time.monotonic() - killed_at < slack(1)
                await asyncio.sleep(0.005)
            assert warden.pid is not None
            assert is_running(warden.pid)
    finally:
        warden.close()
    assert warden.pid is None


async def test_a_warden_without_pidfd_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    await test_a_warden_that_dies_is_replaced_within_a_second_again_and_again()


async def test_a_warden_that_cannot_be_replaced_at_once_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Warden(f"engine-{time.monotonic_ns()}")
    warden = KeptWarden(inner)
    warden.start()
    started = inner.start
    refusals = 0

    def refused_twice() -> None:
        nonlocal refusals
        if refusals == 2:
            return started()
        refusals += 1
        raise OSError("no room")

    monkeypatch.setattr(inner, "start", refused_twice)
    assert inner.pid is not None
    os.kill(inner.pid, signal.SIGKILL)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while refusals < 2 or inner.pid is None or not is_running(inner.pid):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    finally:
        warden.close()


def test_the_successor_of_a_dead_warden_finds_what_runs(start: Callable[..., FakeEngine]) -> None:
    engine = start("sleep 82")
    wait_until(lambda: len(marked(engine.engine_id)) >= 4, what="all children are up")
    children = marked(engine.engine_id)
    os.kill(engine.warden_pid, signal.SIGKILL)
    wait_until(lambda: set(engine.wardens()) - {engine.warden_pid}, what="another warden is up")
    engine.process.kill()
    wait_until(lambda: not any(map(is_running, children)), what="all children are gone")


def test_a_warden_is_small_holds_no_descriptor_of_the_engine_and_carries_no_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENGINE_ID_VARIABLE, "outer-engine")
    reader, writer = os.pipe()
    os.set_inheritable(reader, False)
    warden = Warden("engine-small")
    warden.start()
    try:
        pid = warden.pid
        wait_until(lambda: os.readlink(f"/proc/{pid}/cwd") == "/", what="it is up")
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 4, what="it waits")  # its three and the engine's pidfd
        with open(f"/proc/{pid}/environ", "rb") as stream:
            assert ENGINE_ID_VARIABLE.encode() not in stream.read()
        with open(f"/proc/{pid}/status") as stream:
            memory_kb = next(int(line.split()[1]) for line in stream if line.startswith("VmRSS"))
        assert memory_kb < 16_000
        assert os.getsid(pid or 0) == pid
    finally:
        warden.close()
        os.close(reader)
        os.close(writer)


def test_the_pipe_is_not_inherited_by_children() -> None:
    warden = Warden("engine-pipe")
    warden.start()
    child = subprocess.Popen(["sleep", "81"], close_fds=False)
    try:
        started_at = time.monotonic()
        warden.close()
        assert time.monotonic() - started_at < slack(warden_module.LEAVE_SECONDS)
    finally:
        child.kill()
        child.wait()


def test_a_warden_starts_from_a_zip_archive(tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(warden_module.__file__, "zipped_warden.py")
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r})\n"
        "import os, zipped_warden, time\n"
        "warden = zipped_warden.Warden('engine-zip')\n"
        "warden.start()\n"
        "end = time.monotonic() + 10\n"
        "while os.readlink(f'/proc/{warden.pid}/cwd') != '/' and time.monotonic() < end: time.sleep(0.005)\n"
        "os.write(warden._pipe, b'q')\n"
        "assert os.waitpid(warden.pid, 0)[1] == 0\n"
        "print('left')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"left\n"
