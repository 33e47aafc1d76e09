from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.dags.attempts import attempt, value_of
from tests.until import wait_until

from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.dags import (
    DAG,
    BashOperator,
    DagError,
    EmptyOperator,
    HttpOperator,
    SubprocessOperator,
    TaskFailed,
    TaskTimeout,
    task,
)
from tidemill.dags.operators import subprocess as subprocess_operator
from tidemill.dags.operators.command import Command
from tidemill.pipeline.tasks.executor import Executor
from tidemill.pipeline.tasks.process import Process


def bash(command: str, **arguments: Any) -> Any:
    with DAG("d") as dag:
        BashOperator(task_id="t", bash_command=command, **arguments)
    return attempt(dag, "t")


def program(*args: str, **arguments: Any) -> Any:
    with DAG("d") as dag:
        SubprocessOperator(task_id="t", args=args, **arguments)
    return attempt(dag, "t")


def test_an_empty_task_does_nothing() -> None:
    with DAG("d") as dag:
        EmptyOperator(task_id="t")
    assert attempt(dag, "t").ending == Success()


def test_a_command_returns_its_last_line_and_logs_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert value_of(bash("echo one; echo two >&2; printf three")) == "three"
    assert [record.getMessage() for record in caplog.records] == ["one", "two", "three"]
    assert value_of(bash("true")) == ""
    assert value_of(bash(r"printf '\xff\n'")) == r"\xff"


def test_an_interruption_while_a_command_is_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    interrupted = threading.Event()
    start = Command._start

    def start_and_interrupt(self: Command, folder: str, stdin: Any) -> subprocess.Popen[bytes]:
        started.append(start(self, folder, stdin))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupted.wait(60)
        return started[0]

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise TaskTimeout("it took too long")

    monkeypatch.setattr(Command, "_start", start_and_interrupt)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(TaskTimeout):
            Command(["sleep", "1000"], None, None, logging.getLogger()).run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_while_the_thread_that_starts_a_command_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    threads: list[threading.Thread] = []
    start, submit = Command._start, ThreadPoolExecutor.submit

    def start_noted(self: Command, folder: str, stdin: Any) -> subprocess.Popen[bytes]:
        started.append(start(self, folder, stdin))
        return started[0]

    def submit_interrupted(self: ThreadPoolExecutor, *given: Any) -> Any:
        if moment == "after":
            submit(self, *given).result()
            threads.extend(self._threads)
            self._threads.clear()  # as if it had come while the thread was started
        else:
            threads.append(threading.Thread(target=lambda: (ended.wait(60), suppressed(*given))))
            threads[0].start()
        raise TaskTimeout("it took too long")

    def suppressed(function: Any, *given: Any) -> None:
        with contextlib.suppress(TaskFailed):
            function(*given)

    ended = threading.Event()
    monkeypatch.setattr(Command, "_start", start_noted)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_interrupted)
    with pytest.raises(TaskTimeout):
        Command(["sleep", "1000"], None, None, logging.getLogger()).run()
    ended.set()
    for thread in threads:
        thread.join(60)
    assert [process.returncode for process in started] == ([-signal.SIGTERM] if moment == "after" else [])


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("exit 3", {}, Failure("TaskError: the command ended with exit code 3")),
        ("exit 99", {}, Skip("the command ended with exit code 99")),
        ("exit 99", {"skip_on_exit_code": None}, Failure("TaskError: the command ended with exit code 99")),
        ("exit 4", {"skip_on_exit_code": [4, 5]}, Skip("the command ended with exit code 4")),
        ("kill -9 $$", {}, Failure("TaskError: the command was killed by SIGKILL")),
        (" ", {}, Failure("TaskFailed: the command must be a non-empty string, got ' '", False)),
    ],
)
def test_how_a_command_ends_is_how_the_task_ends(command: str, arguments: Any, expected: Any) -> None:
    assert bash(command, **arguments).ending == expected


def test_the_environment_and_folder_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "o")
    assert value_of(bash("echo $OUTER$INNER", env={"INNER": "{{ ds }}"})) == "2026-01-01"
    assert value_of(bash("echo $OUTER$INNER", env={"INNER": "i"}, append_env=True)) == "oi"
    assert value_of(bash("pwd", cwd=str(tmp_path))) == str(tmp_path)
    folder = value_of(bash("pwd"))
    assert folder != os.getcwd()
    assert not Path(folder).exists()
    assert "cannot be started" in str(bash("pwd", cwd=f"{tmp_path}/missing").ending)


def test_a_command_leaves_nothing_behind(tmp_path: Path) -> None:
    assert value_of(bash(f"sleep 1000 >/dev/null 2>&1 & echo $! > {tmp_path}/pid; echo done")) == "done"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("sleep 1000 & echo $! > {pid}; echo hi", "hi"),
        ("(sleep 0.2; echo late; sleep 1000) & echo $! > {pid}; echo hi", "late"),
        ("yes & echo $! > {pid}; echo hi", "y"),
    ],
)
def test_a_command_is_over_although_something_in_the_background_holds_its_output(
    tmp_path: Path, command: str, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert value_of(bash(command.format(pid=tmp_path / "pid"))) == last
    assert "killing background processes that still hold its output open" in caplog.text
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def test_the_folder_of_a_command_whose_task_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import logging\n"
        "from tidemill.dags.operators.command import Command\n"
        "Command(['sh', '-c', 'touch kept; kill -9 $PPID'], None, None, logging.getLogger()).run()\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("kept")] == ["kept"]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert value_of(bash("ls -A | wc -l")) == "0"
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    assert value_of(bash(f"echo hi; exec >&- 2>&-; sleep 0.5; touch {tmp_path}/done")) == "hi"
    assert (tmp_path / "done").exists()


def test_the_end_of_a_command_is_seen_without_help_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert value_of(bash("sleep 1000 & sleep 0.2; echo hi")) == "hi"


def test_long_lines_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert value_of(bash("head -c 200000 /dev/zero | tr '\\0' a; echo; printf 'b\\n\\nc'")) == "c"
    lines = [record.getMessage() for record in caplog.records]
    assert [len(line) for line in lines[:-3]] == [65536, 65536, 65536, 200_000 - 3 * 65536]
    assert lines[-3:] == ["b", "", "c"]


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["bash", "program"])
def test_a_timeout_ends_the_command(tmp_path: Path, kind: str) -> None:
    script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 1000"

    def interrupt() -> None:
        wait_until((tmp_path / "pid").exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_timeout(*_: Any) -> None:
        raise TaskTimeout("too long")

    before = signal.signal(signal.SIGUSR1, raise_timeout)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        result = bash(script) if kind == "bash" else program("bash", "-c", script)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert result.ending == Failure("TaskTimeout: too long")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def test_a_timeout_in_the_middle_of_a_start_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def raise_timeout(executor: Executor, run: Process) -> None:
        started.append(run.pid or 0)
        raise TaskTimeout("too long")

    monkeypatch.setattr(Executor, "_watch", raise_timeout)
    monkeypatch.setattr(subprocess_operator, "GRACE_SECONDS", 0.1)
    assert program("sleep", "1000").ending == Failure("TaskTimeout: too long")
    wait_until(lambda: not is_alive(started[0]))


def test_a_function_may_return_the_command() -> None:
    with DAG("d") as dag:

        @task.bash(env={"A": "b"})
        def t(n: int, ds: str = "") -> str:
            return f"echo {n} {ds} $A"

        t(3)
        with pytest.raises(
            DagError, match=r"@task\.bash runs the command that the function returns; leave bash_command out"
        ):
            task.bash(bash_command="x")(lambda: "")()
    assert value_of(attempt(dag, "t")) == "3 2026-01-01 b"


def test_a_program_gets_its_input_and_returns_its_output() -> None:
    assert value_of(program("cat", stdin="a\nü {{ ds }}")) == "a\nü 2026-01-01"
    assert value_of(program("printf", r"\xff")) == b"\xff"
    assert value_of(program("sh", "-c", "echo $A; cat", stdin=b"\0", env={"A": "1"})) == "1\n\0"


@pytest.mark.parametrize(
    ("args", "arguments", "message"),
    [
        (("sh", "-c", "echo no >&2; exit 3"), {}, "'sh' failed (exit"),
        (("no-such-program",), {}, "no program 'no-such-program' in PATH"),
        (("sleep", "1000"), {"timeout": 0.1}, "'sleep' failed (timeout"),
        (("head", "-c", "2000", "/dev/zero"), {"max_output_bytes": 1000}, "'head' failed (output"),
    ],
)
def test_a_program_that_fails_is_named(args: tuple[str, ...], arguments: Any, message: str) -> None:
    ending = program(*args, **arguments).ending
    assert isinstance(ending, Failure)
    assert message in ending.error


def test_a_program_carries_the_mark_of_the_process_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_ENGINE_ID", "tree-1-a")
    assert "TIDEMILL_ENGINE_ID=tree-1-a" in str(value_of(program("env"))).splitlines()


def test_a_program_may_skip_and_is_given_as_a_list() -> None:
    assert program("sh", "-c", "exit 99").ending == Skip("the program ended with exit code 99")
    with DAG("d"), pytest.raises(DagError, match="task 't': args must be a list of the program and its arguments"):
        SubprocessOperator(task_id="t", args="ls -l")


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status = int(self.path.rpartition("/")[2].partition("?")[0] or 200)
        self.send_response(status)
        self.send_header("content-type", "application/json; charset=utf-8" if status == 200 else "text/plain")
        self.end_headers()
        self.wfile.write(body or self.path.encode())

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def request(address: str, **arguments: Any) -> Any:
    with DAG("d") as dag:
        HttpOperator(task_id="t", url=address, method="POST", **arguments)
    return attempt(dag, "t")


def test_a_request_returns_the_answer(url: str) -> None:
    assert value_of(request(f"{url}/200", json={"a": "{{ ds }}"})) == {"a": "2026-01-01"}
    assert value_of(request(f"{url}/201", query={"q": "{{ run_id }}"})) == "/201?q=run"
    assert value_of(request(f"{url}/201", data="x", response_filter=lambda answer: answer.status_code)) == 201


def test_a_request_that_fails_names_the_address_without_its_secrets(url: str) -> None:
    secret = url.replace("//", "//me:hunter2@")
    for ending in (
        request(f"{secret}/503?token=hunter2").ending,
        request("http://me:hunter2@127.0.0.1:1/?token=hunter2").ending,
        request(f"{secret}/200", json=1, response_check=lambda answer: False).ending,
    ):
        assert isinstance(ending, Failure)
        assert "http://127.0.0.1" in ending.error
        assert "hunter2" not in ending.error.replace("/503?token=hunter2", "")
    with DAG("d"), pytest.raises(DagError, match="task 't': json and data are both set"):
        HttpOperator(task_id="t", url=url, json=1, data="x")
