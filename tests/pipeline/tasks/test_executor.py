"""The executor against real processes: every way a task can end, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.until import slack, until

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.executor import Executor, Process, ProcessOutcome
from tidemill.runtime.process.table import find_children, list_processes, read_command, read_environment

ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
DEADLINE_SECONDS = 20.0


def make(environ: dict[str, str] | None = None, **settings: Any) -> Executor:
    executor = Executor(ExecutorSettings(**settings), "engine-under-test", ENVIRON if environ is None else environ)
    executor.open()
    return executor


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def spare_fds() -> int:
    """Return how many descriptors may come and go: Kafka clients of other tests open pipes when they reconnect."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith("rdk:"):
                return 6
    return 0


def processes_with(marker: str) -> list[int]:
    """The living processes whose command line or environment has `marker` in it."""
    others = set(list_processes()) - {os.getpid()}
    return [
        pid for pid in others if marker in read_command(pid) or any(marker in each for each in read_environment(pid))
    ]


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    built = make(term_grace_seconds=2.0)
    yield built
    await built.kill_all(0)
    built.close()


def children() -> set[int]:
    """Return the children of this process; other tests' servers are among them."""
    return find_children(os.getpid())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, others = open_fds(), children()
    yield
    assert children() <= others  # no child of ours, dead or alive
    assert len(open_fds()) <= len(before) + 1 + spare_fds()  # one for the listing itself


async def run(
    executor: Executor,
    *argv: str,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    timeout_seconds: float = DEADLINE_SECONDS,
) -> ProcessOutcome:
    over: asyncio.Future[ProcessOutcome] = asyncio.get_running_loop().create_future()
    executor.start(argv, stdin, env or {}, timeout_seconds, over.set_result)
    assert executor.running >= 1
    async with asyncio.timeout(DEADLINE_SECONDS * 2):
        return await over


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


async def test_output_and_exit_code_of_a_task_come_back(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "cat; echo oh >&2", stdin=b"hello")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, b"hello", b"oh\n")
    assert outcome.kind is None
    assert outcome.exception is None
    assert outcome.pid is not None
    assert 0 < outcome.duration_seconds < DEADLINE_SECONDS
    assert executor.running == 0


async def test_a_task_without_stdin_reads_an_empty_one(executor: Executor) -> None:
    assert (await run(executor, "wc", "-c")).stdout.split() == [b"0"]


async def test_a_task_inherits_no_descriptors(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.pipeline.tasks.executor.DESCRIPTORS_SECONDS", 0.0)
    for _ in range(2):  # a library may open others at any time
        pipe = os.pipe()
        for fd in pipe:
            os.set_inheritable(fd, True)
        outcome = await run(executor, "sh", "-c", "ls /proc/$$/fd")
        assert outcome.stdout.split() == [b"0", b"1", b"2"]
        for fd in pipe:
            os.close(fd)


async def test_exit_code_1_is_a_failure_of_kind_exit_with_its_output(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "echo out; echo why >&2; exit 1")
    assert (outcome.exit_code, outcome.kind, outcome.exception) == (1, ErrorKind.EXIT, None)
    assert (outcome.stdout, outcome.stderr) == (b"out\n", b"why\n")


async def test_a_task_ended_by_a_signal_has_its_negative_number(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "kill -USR1 $$")
    assert (outcome.exit_code, outcome.kind) == (-signal.SIGUSR1, ErrorKind.EXIT)


@pytest.mark.parametrize("program", ["/nonexistent/program", "no-such-program-anywhere", "", "/etc/passwd/x"])
async def test_a_missing_binary_is_an_outcome_of_kind_missing(executor: Executor, program: str) -> None:
    outcome = await run(executor, program)
    assert (outcome.kind, outcome.exit_code, outcome.pid) == (ErrorKind.MISSING, None, None)
    assert outcome.exception


async def test_a_script_whose_interpreter_is_missing_is_of_kind_missing(executor: Executor, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/nonexistent/interpreter\n")
    script.chmod(0o755)
    outcome = await run(executor, str(script))
    assert outcome.kind is ErrorKind.MISSING
    assert (
        "cannot be executed: No such file or directory; install it, or correct binary_path, or the" in outcome.exception
    )


@pytest.mark.parametrize("content", ["#!/bin/sh\n", ""])
async def test_a_file_that_may_not_be_executed_is_of_kind_permission(
    executor: Executor, tmp_path: Path, content: str
) -> None:
    script = tmp_path / "script"
    script.write_text(content)
    script.chmod(0o644 if content else 0o755)  # not executable; executable, but of no known format
    outcome = await run(executor, str(script))
    assert (outcome.kind, outcome.exit_code, outcome.pid) == (ErrorKind.PERMISSION, None, None)
    advice = "make it executable (chmod +x)" if content else "the first line of a script is #! and its interpreter"
    assert f"{str(script)!r} cannot be executed: " in outcome.exception
    assert advice in outcome.exception


async def test_a_bare_name_that_is_found_but_not_executable_is_of_kind_permission(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    executor = make({"PATH": str(tmp_path)})
    assert (await run(executor, "tool")).kind is ErrorKind.PERMISSION
    executor.close()


async def test_a_program_that_moved_is_found_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "tool").write_text("#!/bin/sh\necho here\n")
    (first / "tool").chmod(0o755)
    executor = make({"PATH": f"{first}:{second}:{os.environ['PATH']}"})
    assert (await run(executor, "tool")).stdout == b"here\n"
    (first / "tool").rename(second / "tool")
    assert (await run(executor, "tool")).kind is ErrorKind.MISSING
    assert (await run(executor, "tool")).stdout == b"here\n"
    executor.close()


@pytest.mark.parametrize(
    ("argv", "stdin", "env"),
    [
        (("echo", 5), b"", {}),
        (("echo", "a\0b"), b"", {}),
        ((5,), b"", {}),
        (5, b"", {}),
        (("cat",), "text", {}),
        (("cat",), [1], {}),
        (("cat",), b"", {"A": 1}),
        (("cat",), b"", {"A=B": "x"}),
        (("cat",), b"", {"A": "x\0"}),
        (("echo", "\ud800"), b"", {}),
        (("echo", "x" * 3_000_000), b"", {}),
    ],
)
async def test_a_task_that_can_never_start_is_an_outcome(executor: Executor, argv: Any, stdin: Any, env: Any) -> None:
    over: asyncio.Future[ProcessOutcome] = asyncio.get_running_loop().create_future()
    executor.start(argv, stdin, env, 5.0, over.set_result)
    assert not over.done()
    outcome = await over
    assert (outcome.kind, outcome.exit_code, outcome.pid) == (ErrorKind.EXIT, None, None)
    assert outcome.exception
    assert outcome.exception.startswith("cannot be started: ")


@pytest.mark.parametrize("limit", [0, -1, float("nan"), None, "2"])
async def test_a_time_limit_that_is_none_is_an_outcome(executor: Executor, limit: Any) -> None:
    assert (await run(executor, "true", timeout_seconds=limit)).kind is ErrorKind.EXIT


async def test_a_host_out_of_descriptors_is_not_the_tasks_fault(executor: Executor) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        refused = await run(executor, "cat", stdin=b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (refused.kind, refused.exit_code, refused.pid) == (None, None, None)
    assert "Too many open files" in (refused.exception or "")
    assert (await run(executor, "cat", stdin=b"x")).stdout == b"x"


async def test_tasks_are_still_run_where_the_kernel_gives_no_pidfd(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    big = os.urandom(1_000_000)
    outcomes = await asyncio.gather(
        run(executor, "cat", stdin=big),
        run(executor, "sh", "-c", "exit 3"),
        run(executor, "sleep", "60", timeout_seconds=0.2),
    )
    assert outcomes[0].stdout == big
    assert outcomes[1].exit_code == 3
    assert outcomes[2].kind is ErrorKind.TIMEOUT


async def test_a_timeout_ends_the_whole_process_group(executor: Executor) -> None:
    marker = f"grandchildren-{time.monotonic_ns()}"
    script = f"sh -c 'sleep 61; : {marker}' & sh -c 'trap \"\" TERM; sleep 62; : {marker}' & echo started; wait; wait"
    outcome = await run(executor, "sh", "-c", script, env={"MARK": marker}, timeout_seconds=0.5)
    assert (outcome.exit_code, outcome.stderr, outcome.exception, outcome.kind) == (
        -1,
        b"task timed out",
        "Timeout after 0.5s",
        ErrorKind.TIMEOUT,
    )
    assert 0.5 <= outcome.duration_seconds < slack(2)  # the leader obeys SIGTERM; the rest is killed then
    await until(lambda: not processes_with(marker), what="the grandchildren are gone")


async def test_a_task_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    executor = make(term_grace_seconds=0.3)
    outcome = await run(executor, "sh", "-c", "trap '' TERM; exec sleep 60", timeout_seconds=1)
    assert outcome.kind is ErrorKind.TIMEOUT
    assert outcome.exception == "Timeout after 1s"
    assert 1.2 < outcome.duration_seconds < slack(5)
    executor.close()


async def test_a_task_may_use_the_grace_to_end_well_and_is_still_timed_out(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "trap 'exit 0' TERM; sleep 60 & wait", timeout_seconds=0.3)
    assert (outcome.exit_code, outcome.kind) == (-1, ErrorKind.TIMEOUT)
    assert outcome.duration_seconds < slack(1.5)


async def test_a_shorter_limit_that_starts_later_fires_first(executor: Executor) -> None:
    slow = asyncio.create_task(run(executor, "sleep", "60", timeout_seconds=1.0))
    await asyncio.sleep(0)
    fast = await run(executor, "sleep", "60", timeout_seconds=0.2)
    assert fast.kind is ErrorKind.TIMEOUT
    assert not slow.done()
    assert (await slow).exception == "Timeout after 1s"


async def test_grandchildren_of_a_task_that_ended_are_killed(executor: Executor) -> None:
    marker = f"left-{time.monotonic_ns()}"
    outcome = await run(executor, "sh", "-c", "sleep 63 & echo done", env={"MARK": marker})
    assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")
    assert outcome.duration_seconds < slack(5)
    await until(lambda: not processes_with(marker), what="the grandchild is gone")


async def test_a_grandchild_that_left_the_group_does_not_hold_the_slot(executor: Executor) -> None:
    marker = f"setsid-{time.monotonic_ns()}"
    code = (
        "import os,sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); os.execvp('sleep', ['sleep', '64'])\n"
        "sys.stdout.write('parent')"
    )
    started = time.monotonic()
    outcome = await run(executor, *python(code), env={"MARK": marker})
    assert (outcome.exit_code, outcome.stdout, outcome.kind) == (0, b"parent", None)
    assert time.monotonic() - started < slack(5)
    await until(lambda: processes_with(marker), what="the grandchild shows")
    for pid in processes_with(marker):
        os.kill(pid, signal.SIGKILL)


async def test_5_mb_of_stdout_come_back_complete(executor: Executor) -> None:
    outcome = await run(executor, "head", "-c", "5000000", "/dev/zero")
    assert outcome.exit_code == 0
    assert outcome.stdout == bytes(5_000_000)


async def test_a_child_that_never_reads_5_mb_of_stdin_does_not_block(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "echo done", stdin=bytes(5_000_000))
    assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")


async def test_a_child_that_closes_its_stdin_and_continues_is_not_disturbed(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", "exec <&-; sleep 0.2; echo done", stdin=bytes(5_000_000))
    assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")


async def test_a_child_that_sleeps_on_unread_stdin_is_timed_out(executor: Executor) -> None:
    outcome = await run(executor, "sleep", "60", stdin=bytes(5_000_000), timeout_seconds=0.2)
    assert outcome.kind is ErrorKind.TIMEOUT


@pytest.mark.parametrize("size", [1, 4096, 4097, 65536, 65537, 5_000_000])
async def test_binary_stdin_comes_back_as_binary_stdout(executor: Executor, size: int) -> None:
    data = os.urandom(size)
    outcome = await run(executor, "cat", stdin=data)
    assert outcome.stdout == data


async def test_invalid_utf8_is_kept_as_it_is(executor: Executor) -> None:
    outcome = await run(executor, "sh", "-c", r"printf '\377\376'; printf '\200' >&2")
    assert (outcome.stdout, outcome.stderr) == (b"\xff\xfe", b"\x80")


async def test_both_outputs_are_read_while_stdin_is_fed(executor: Executor) -> None:
    code = "import os\nwhile data := os.read(0, 65536):\n    os.write(1, data); os.write(2, data[:len(data) // 8])"
    outcome = await run(executor, *python(code), stdin=bytes(4_000_000))
    assert len(outcome.stdout) == 4_000_000
    assert 400_000 < len(outcome.stderr) <= 500_000


@pytest.mark.parametrize(("stream", "redirect"), [("stdout", ""), ("stderr", ">&2")])
async def test_too_much_output_fails_the_task_and_kills_its_group(stream: str, redirect: str) -> None:
    executor = make(max_stdout_bytes=200_000, max_stderr_bytes=100_000)
    marker = f"flood-{time.monotonic_ns()}"
    outcome = await run(executor, "sh", "-c", f"sleep 65 & exec yes {redirect}", env={"MARK": marker})
    assert outcome.kind is ErrorKind.OUTPUT
    assert f"of {stream} (executor.max_{stream}_bytes)" in (outcome.exception or "")
    assert outcome.stdout == b""
    assert len(outcome.stderr) == (100_000 if stream == "stderr" else 0)
    await until(lambda: not processes_with(marker), what="its group is gone")
    executor.close()


@pytest.mark.parametrize(("size", "kind"), [(1000, None), (1001, ErrorKind.OUTPUT)])
async def test_the_cap_itself_is_allowed_and_one_byte_more_is_not(size: int, kind: ErrorKind | None) -> None:
    executor = make(max_stdout_bytes=1000)
    assert (await run(executor, "head", "-c", str(size), "/dev/zero")).kind is kind
    executor.close()


async def test_tasks_have_the_filtered_environment_the_configured_one_their_own_and_the_engines_id() -> None:
    environ = ENVIRON | {
        "KEEP": "1",
        "DB_PASSWORD": "x",
        "my_token": "x",
        "AWS_KEY": "x",
        "TIDEMILL_CONFIG": "x",
        "_TIDEMILL_DAEMON_PID": "1",
    }
    executor = make(environ, env={"CONFIGURED": "2", "A_TOKEN": "meant"})
    own = {"OWN": "3", "KEEP": "4", "TIDEMILL_ENGINE_ID": "forged"}
    plain = set((await run(executor, "env")).stdout.decode().split())
    with_own = set((await run(executor, "env", env=own)).stdout.decode().split())
    base = {f"PATH={ENVIRON['PATH']}", "LANG=C.UTF-8", "CONFIGURED=2", "A_TOKEN=meant"}
    base |= {"TIDEMILL_ENGINE_ID=engine-under-test"}
    assert plain == base | {"KEEP=1"}
    assert with_own == base | {"KEEP=4", "OWN=3"}
    executor.close()


async def test_tasks_start_with_default_signals_and_no_descriptor_of_the_engine(executor: Executor) -> None:
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        status = (await run(executor, "cat", "/proc/self/status", stdin=b"x")).stdout.decode()
        fds = (await run(executor, "ls", "/proc/self/fd", stdin=b"x")).stdout.split()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, action in ignored.items():
            signal.signal(number, action)
    masks = {name: int(value, 16) for name, _, value in (line.partition(":") for line in status.splitlines())
             if name in ("SigBlk", "SigIgn")}  # fmt: skip
    masks["SigIgn"] &= ~(0b11 << 31)  # 32 and 33 belong to the C library, which ignores them
    assert masks == {"SigBlk": 0, "SigIgn": 0}
    assert len(fds) == 4  # the three standard ones, and the listing itself


async def test_kill_all_ends_everything_and_reports_nothing(executor: Executor) -> None:
    told: list[ProcessOutcome] = []
    marker = f"kill-all-{time.monotonic_ns()}"
    obedient = "echo up; sleep 66 & wait"
    stubborn = "trap '' TERM; echo up; exec sleep 60"
    for script in (obedient, stubborn) * 2:
        executor.start(("sh", "-c", script), b"", {"MARK": marker}, 60.0, told.append)
    await until(lambda: len(processes_with(marker)) >= 6, what="all are up")
    executor.start(("/nonexistent",), b"", {}, 60.0, told.append)  # it is told of as soon as the loop runs
    assert executor.running == 5
    started = time.monotonic()
    await executor.kill_all(0.3)
    assert 0.25 < time.monotonic() - started < slack(3)
    assert executor.running == 0
    assert told == []
    await until(lambda: not processes_with(marker), what="all are gone")


async def test_kill_ends_only_the_runs_it_is_given(executor: Executor) -> None:
    told: list[ProcessOutcome] = []
    runs: list[Process] = [executor.start(("sleep", "67"), b"", {}, 60.0, told.append) for _ in range(2)]
    other = asyncio.create_task(run(executor, "sh", "-c", "sleep 0.3; echo other"))
    await asyncio.sleep(0)
    await executor.kill(runs, 5.0)
    assert executor.running == 1
    assert (await other).stdout == b"other\n"
    assert told == []


@pytest.mark.alone
async def test_two_kills_at_once_wait_only_for_their_own(executor: Executor) -> None:
    def start(script: str) -> Process:
        return executor.start(("sh", "-c", script), b"", {}, 60.0, lambda outcome: None)

    obedient, stubborn = start("exec sleep 82"), start("trap '' TERM; echo up; exec sleep 60")
    await until(lambda: stubborn.stdout.chunks, what="the stubborn one is up")
    started = time.monotonic()
    slow = asyncio.create_task(executor.kill([stubborn], 1.0))
    await asyncio.sleep(0)
    await executor.kill([obedient], 1.0)
    assert time.monotonic() - started < 0.5
    await slow
    assert 0.9 < time.monotonic() - started < slack(3)
    assert executor.running == 0


async def test_a_kill_that_nobody_waits_for_is_carried_out(executor: Executor) -> None:
    run = executor.start(("sh", "-c", "trap '' TERM; echo up; exec sleep 60"), b"", {}, 60.0, lambda outcome: None)
    await until(lambda: run.stdout.chunks, what="it is up")
    killing = asyncio.create_task(executor.kill([run], 0.2))
    await asyncio.sleep(0)
    killing.cancel()
    await until(lambda: not executor.running, what="it is gone")


async def test_closing_kills_and_reaps_what_still_runs() -> None:
    executor = make()
    started = executor.start(("sleep", "68"), bytes(100_000), {}, 60.0, lambda outcome: None)
    executor.close()
    assert executor.running == 0
    with pytest.raises(ProcessLookupError):
        os.kill(started.pid or 0, 0)


async def test_a_callback_that_raises_does_not_keep_others_from_being_told(executor: Executor) -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))

    def broken(outcome: ProcessOutcome) -> None:
        raise RuntimeError("mine")

    for _ in range(4):
        executor.start(("true",), b"", {}, 5.0, broken)
    outcomes = await asyncio.gather(*(run(executor, "true") for _ in range(4)))
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4
    await until(lambda: len(reported) == 4, what="all four are reported")
    assert executor.running == 0


async def test_an_exit_status_that_other_code_took_fails_the_task(executor: Executor) -> None:
    over: asyncio.Future[ProcessOutcome] = asyncio.get_running_loop().create_future()
    started = executor.start(("true",), b"", {}, 5.0, over.set_result)
    os.waitpid(started.pid or 0, 0)
    outcome = await over
    assert (outcome.kind, outcome.exit_code) == (ErrorKind.EXIT, None)
    assert "exit code is unknown" in (outcome.exception or "")


async def test_pipes_never_get_the_numbers_of_the_standard_streams() -> None:
    saved = os.dup(0)
    os.close(0)
    try:
        executor = make()
        assert stat.S_ISCHR(os.fstat(0).st_mode)
        assert (await run(executor, "cat", stdin=b"x")).stdout == b"x"
        executor.close()
    finally:
        os.dup2(saved, 0)
        os.close(saved)


async def run_many(count: int) -> None:
    """Run tasks of all kinds, 8 at a time; nothing may be left, and every one is told of once."""
    executor = make(max_stdout_bytes=100_000, term_grace_seconds=0.5)
    before = open_fds()
    kinds: dict[str, int] = {}
    left = count
    over = asyncio.Event()

    def start_next() -> None:
        nonlocal left
        if left == 0:
            if not executor.running:
                over.set()
            return
        left -= 1
        chosen = left % 100
        argv, stdin, limit = ("cat",), b"x" * 230, 60.0
        if chosen == 0:
            argv = ("/nonexistent",)
        elif chosen == 1:
            argv = ("false",)
        elif chosen == 2:
            argv = ("yes",)
        elif chosen == 3 and left % 200 == 3:
            argv, limit = ("sleep", "60"), 0.05
        elif chosen == 4:
            argv, stdin = ("true",), bytes(300_000)
        elif chosen == 5:
            stdin = bytes(90_000)
        elif chosen == 6:
            argv = ("sh", "-c", "sleep 69 & exit 0")
        executor.start(argv, stdin, {}, limit, done)

    def done(outcome: ProcessOutcome) -> None:
        kind = outcome.kind.value if outcome.kind else "ok"
        kinds[kind] = kinds.get(kind, 0) + 1
        start_next()

    for _ in range(8):
        start_next()
    await asyncio.wait_for(over.wait(), 110)
    hundreds = count // 100
    assert kinds == {
        "ok": count - 3 * hundreds - hundreds // 2,
        "missing": hundreds,
        "exit": hundreds,
        "output": hundreds,
        "timeout": hundreds // 2,
    }
    assert executor.running == 0
    # One that was left by each task of a kind would be more.
    assert open_fds() == before or len(open_fds()) <= len(before) + min(spare_fds(), hundreds // 2)
    executor.close()


async def test_1000_tasks_of_all_kinds_leave_nothing_behind() -> None:
    await run_many(1000)


@pytest.mark.nightly
async def test_10000_tasks_of_all_kinds_leave_nothing_behind() -> None:
    await run_many(10_000)
