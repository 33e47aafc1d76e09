"""The worker lock, with real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.lock import GroupInUseError, WorkerLock, WorkerNameInUseError, lock_file
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code

HOLDER = """
import sys
from pathlib import Path
from tidemill.runtime.files.lock import WorkerLock
lock = WorkerLock("group", "worker", directory=Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_and_told_who_and_what_to_do(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(WorkerNameInUseError) as caught:
            WorkerLock("group", "worker", name_env="MY_NAME", directory=tmp_path).acquire()

        message = str(caught.value)
        assert f"process {process.pid};" in message
        assert "MY_NAME=..." in message
        assert "'worker'" in message
        assert "'group'" in message
        assert isinstance(caught.value, ConfigError)
        assert find_exit_code(caught.value) is ExitCode.FENCED


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_free_once_its_holder_is_gone(tmp_path: Path, number: int) -> None:
    with holder(tmp_path) as process:
        process.send_signal(number)
        process.wait(60)

        with WorkerLock("group", "worker", directory=tmp_path) as lock:
            assert lock.path.read_text().startswith(f"{os.getpid()}\n")


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    lock = WorkerLock("group", "worker", directory=tmp_path)
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()

    with WorkerLock("group", "worker", directory=tmp_path):
        pass


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = WorkerLock("group", "worker", directory=tmp_path)
    lock.acquire()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        lock.release()
        with WorkerLock("group", "worker", directory=tmp_path):
            pass
    finally:
        child.communicate(b"")


@pytest.mark.parametrize("other", [("group", "other"), ("other", "worker"), ("group.worker", ""), ("gro", "up.worker")])
def test_other_names_do_not_disturb_each_other(tmp_path: Path, other: tuple[str, str]) -> None:
    with WorkerLock("group", "worker", directory=tmp_path), WorkerLock(*other, directory=tmp_path):
        pass


def test_a_group_is_that_of_one_kafka(tmp_path: Path) -> None:
    here = WorkerLock("group", "worker", brokers="a:9092,b:9092", topic="orders", directory=tmp_path)
    elsewhere = WorkerLock("group", "worker", brokers="c:9092", topic="words", directory=tmp_path)
    with here, elsewhere, pytest.raises(WorkerNameInUseError):
        WorkerLock("group", "worker", brokers="B:9092, a:9092", topic="orders", directory=tmp_path).acquire()


@pytest.mark.parametrize("worker", ["worker", "another"])
def test_a_group_that_is_used_for_another_topic_is_refused_with_the_line_that_helps(
    tmp_path: Path, worker: str
) -> None:
    with WorkerLock("tidemill-workers", "worker", topic="orders", directory=tmp_path):
        lock = WorkerLock("tidemill-workers", worker, topic="words", directory=tmp_path)
        with pytest.raises(GroupInUseError) as caught:
            lock.acquire()
        assert f"process {os.getpid()} on this host, which reads topic 'orders'" in str(caught.value)
        assert "\n  consumer_group: tidemill-words" in str(caught.value)
        assert find_exit_code(caught.value) is ExitCode.CONFIG
        with WorkerLock("tidemill-words", worker, topic="words", directory=tmp_path):
            pass
    with lock:
        pass


def test_another_worker_of_the_same_pipeline_and_groups_of_other_names_are_let_be(tmp_path: Path) -> None:
    with (
        WorkerLock("group", "one", topic="orders", directory=tmp_path),
        WorkerLock("group", "two", topic="orders", directory=tmp_path),
        WorkerLock("other", "one", topic="words", directory=tmp_path),
    ):
        pass


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    path = WorkerLock("../../etc", "a/b", directory=tmp_path).path

    assert path.parent == tmp_path


def test_the_folder_is_that_of_the_session_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    with WorkerLock("group", "worker") as lock:
        assert lock.path.parent == tmp_path / "tidemill"
        assert lock.path.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_session_folder_the_users_own_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    assert WorkerLock("g", "w").path.parent == Path(f"/tmp/tidemill-{os.getuid()}")


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        WorkerLock("g", "w", directory=tmp_path / "file").acquire()


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    lock = WorkerLock("g", "w", directory=tmp_path)
    lock.path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError):
        lock.acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_the_file_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="no space left"):
            lock_file(tmp_path / "lock")
    os.close(lock_file(tmp_path / "lock"))
