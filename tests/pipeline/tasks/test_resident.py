"""Resident executors against real programs: what comes back, what dies, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.pipeline.conftest import P0, P1, message
from tests.pipeline.tasks.test_executor import (
    DEADLINE_SECONDS,
    ENVIRON,
    children,
    nothing_is_left,  # noqa: F401  # used by every test here
    processes_with,
)
from tests.until import slack, until

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ErrorKind, ExecutorError, ExecutorTask
from tidemill.pipeline.tasks.executor import ProcessOutcome
from tidemill.pipeline.tasks.resident import ResidentExecutor, build_executor
from tidemill.runtime.process.warden import marked
from tidemill.sinks.payloads import CollectResult, FilePayload

ECHO = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"id": task["id"], "stdout": task["stdin"]}), flush=True)
"""

#: Does what the task's input says, as Python.
OBEY = """
import json, os, signal, sys, time
def answer(**what):
    print(json.dumps({"id": task["id"], **what}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    exec(task["stdin"])
"""

LENGTH = """
import json, struct, sys
source, sink = sys.stdin.buffer, sys.stdout.buffer
while header := source.read(4):
    head, _, data = source.read(struct.unpack(">I", header)[0]).partition(b"\\n")
    body = json.dumps({"id": json.loads(head)["id"]}).encode() + b"\\n" + data[::-1]
    sink.write(struct.pack(">I", len(body)) + body)
    sink.flush()
"""


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., ResidentExecutor]]:
    built: list[ResidentExecutor] = []

    def build(code: str | None = OBEY, *, resident: dict[str, Any] | None = None, **settings: Any) -> ResidentExecutor:
        more = {"args": ["-I", "-S", "-c", code]} if code is not None else {}
        settings = {"binary_path": sys.executable, "max_executors": 2, "term_grace_seconds": 2.0, **settings}
        whole = ExecutorSettings(mode="resident", resident={**more, **(resident or {})}, **settings)
        executor = build_executor(whole, "engine-under-test", ENVIRON)
        assert isinstance(executor, ResidentExecutor)
        executor.open()
        built.append(executor)
        return executor

    yield build
    for executor in built:
        await executor.kill_all(0)
        executor.close()


def begin(
    executor: ResidentExecutor,
    stdin: str | bytes = "",
    *args: str,
    timeout_seconds: float = DEADLINE_SECONDS,
    **more: Any,
) -> asyncio.Future[ProcessOutcome]:
    over: asyncio.Future[ProcessOutcome] = asyncio.get_running_loop().create_future()
    data = stdin.encode() if isinstance(stdin, str) else stdin
    argv = (more.get("program", sys.executable), *args)
    handle = executor.start(argv, data, more.get("env", {}), timeout_seconds, over.set_result)
    assert not over.done(), "told inside start"
    over.handle = handle  # type: ignore[attr-defined]
    return over


async def run(executor: ResidentExecutor, stdin: str | bytes = "", *args: str, **more: Any) -> ProcessOutcome:
    async with asyncio.timeout(DEADLINE_SECONDS * 2):
        return await begin(executor, stdin, *args, **more)


async def test_one_copy_does_many_tasks_and_is_started_by_the_first(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(ECHO)
    assert executor.pids == []
    outcomes = [await run(executor, f"task {n}\n\x00ü") for n in range(20)]
    assert [outcome.stdout.decode() for outcome in outcomes] == [f"task {n}\n\x00ü" for n in range(20)]
    assert {outcome.pid for outcome in outcomes} == set(executor.pids)
    assert len(executor.pids) == 1
    first = outcomes[0]
    assert (first.exit_code, first.kind, first.exception, first.stderr) == (0, None, None, b"")
    assert 0 < first.duration_seconds < DEADLINE_SECONDS
    assert executor.running == 0


async def test_tasks_at_the_same_time_share_as_many_copies_as_there_may_be(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(ECHO)
    outcomes = await asyncio.gather(*[begin(executor, str(n)) for n in range(50)])
    assert [outcome.stdout for outcome in outcomes] == [b"%d" % n for n in range(50)]
    assert len({outcome.pid for outcome in outcomes}) == 2


async def test_large_inputs_and_outputs_pass_while_both_sides_write(make: Callable[..., ResidentExecutor]) -> None:
    big = "x\u20ac\n" * 400_000
    outcomes = await asyncio.gather(*[begin(make(ECHO), big) for _ in range(2)])
    assert all(outcome.stdout.decode() == big for outcome in outcomes)


async def test_length_frames_carry_any_bytes(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(LENGTH, resident={"framing": "length"})
    blob = os.urandom(300_000) + b"\n\x00"
    assert (await run(executor, blob)).stdout == blob[::-1]
    assert (await run(executor, b"")).stdout == b""
    assert (await run(executor, b"ab")).stdout == b"ba"
    assert len(executor.pids) == 1


async def test_arguments_travel_with_the_task_and_any_json_is_an_output(make: Callable[..., ResidentExecutor]) -> None:
    executor = make()
    assert (await run(executor, "answer(stdout=task['args'])", "-n", "ü")).stdout == b'["-n", "\\u00fc"]'
    assert (await run(executor, "answer()")).stdout == b""


async def test_an_exit_code_in_the_answer_is_a_failure_and_the_copy_lives_on(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make()
    outcome = await run(executor, "answer(stdout='half', stderr='no such order', exit_code=3)")
    assert (outcome.exit_code, outcome.kind, outcome.stdout) == (3, ErrorKind.EXIT, b"half")
    assert outcome.stderr == b"no such order"
    assert (await run(executor, "answer(stdout='fine')")).pid == outcome.pid


async def test_what_is_written_to_stderr_belongs_to_the_task_and_is_bounded(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(max_stderr_bytes=1000)
    assert (await run(executor, "print('hm', file=sys.stderr, flush=True); answer()")).stderr == b"hm\n"
    assert (await run(executor, "answer()")).stderr == b""
    noisy = await run(executor, "sys.stderr.write('y' * 300_000 + 'z' * 500); sys.stderr.flush(); answer()")
    assert noisy.exit_code == 0
    assert noisy.stderr.startswith(b"[299500 earlier bytes omitted]\n")
    assert noisy.stderr.endswith(b"y" * 500 + b"z" * 500)


async def test_a_copy_that_dies_fails_its_task_with_its_last_words_and_is_replaced(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(max_executors=1)
    before = await run(executor, "answer()")
    outcome = await run(executor, "sys.stderr.write('out of luck'); sys.stderr.flush(); os._exit(7)")
    assert (outcome.exit_code, outcome.kind, outcome.stderr) == (7, ErrorKind.EXIT, b"out of luck")
    assert outcome.exception == "the resident program exited (exit code 7) before it answered"
    killed = await run(executor, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.exit_code, killed.kind) == (-signal.SIGKILL, ErrorKind.EXIT)
    after = await run(executor, "answer(stdout='back')")
    assert after.stdout == b"back"
    assert len({before.pid, killed.pid, after.pid}) == 3


async def test_an_end_with_exit_code_0_before_the_answer_is_a_failure_too(
    make: Callable[..., ResidentExecutor],
) -> None:
    outcome = await run(make(), "sys.exit(0)")
    assert (outcome.exit_code, outcome.kind) == (0, ErrorKind.EXIT)


async def test_an_answer_that_comes_with_the_end_counts(make: Callable[..., ResidentExecutor]) -> None:
    executor = make()
    for _ in range(5):
        over = begin(executor, "answer(stdout='last words'); os._exit(1)")
        os.waitid(os.P_PID, executor.pids[0], os.WEXITED | os.WNOWAIT)  # blocks the loop, so that both are there
        outcome = await over
        assert (outcome.kind, outcome.stdout) == (None, b"last words")
        await until(lambda: not executor.pids, what="it is gone")


async def test_a_task_goes_to_another_copy_if_its_own_ended_while_it_was_idle(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(ECHO, max_executors=1)
    first = await run(executor, "a")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody here knows yet
    second = await run(executor, "b")
    assert (second.stdout, second.kind) == (b"b", None)
    assert second.pid != first.pid


async def test_a_timeout_kills_the_copy_with_its_group_and_the_next_task_gets_another(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(max_executors=1)
    marker = f"resident-{time.monotonic_ns()}"
    before = await run(executor, "answer()")
    stuck = f"import subprocess; subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 61; : {marker}']); time.sleep(60)"
    outcome = await run(executor, stuck, timeout_seconds=0.5)
    assert (outcome.exit_code, outcome.kind, outcome.stderr) == (-1, ErrorKind.TIMEOUT, b"task timed out")
    assert outcome.exception == "Timeout after 0.5s"
    await until(lambda: not processes_with(marker), what="the grandchildren are gone")
    after = await run(executor, "answer()")
    assert (after.kind, before.pid) == (None, outcome.pid)
    assert after.pid != outcome.pid
    assert executor.describe_wait() is None, "a timeout is not a failed start"


async def test_an_answer_after_the_timeout_is_ignored(make: Callable[..., ResidentExecutor]) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (answer(stdout='late'), os._exit(0)))\ntime.sleep(60)"
    assert (await run(make(), code, timeout_seconds=0.3)).kind is ErrorKind.TIMEOUT


async def test_a_time_limit_is_that_of_the_task_not_of_the_copy(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(max_executors=1)
    for _ in range(5):  # together longer than the limit, each far from it on a busy machine, too
        assert (await run(executor, "time.sleep(0.8); answer()", timeout_seconds=3.5)).kind is None
    assert len(executor.pids) == 1


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('loaded 3 models', flush=True)", "which is not a valid answer"),
        (
            "sys.stdout.write(json.dumps({'id': task['id']}) + '\\n{}\\n'); sys.stdout.flush()",
            "which is not a valid answer",
        ),
        (
            "sys.stdout.write((json.dumps({'id': task['id']}) + '\\n') * 2); sys.stdout.flush()",
            "it wrote output without a request",
        ),
        ("print(json.dumps({'id': task['id']}), end='\\nx', flush=True)", "it wrote output without a request"),
        ("task['id'] += 1; answer()", "it answered request 2 instead of 1"),
        ("answer(stdout='x' * 5000)", "more than 1000 bytes of stdout (executor.max_stdout_bytes)"),
        ("sys.stdout.write('x' * 200_000); sys.stdout.flush(); time.sleep(60)", "more than 1000 bytes of stdout"),
        ("sys.stdout.buffer.write(b'\\xff\\n'); sys.stdout.flush()", "which is not a valid answer"),
    ],
)
async def test_a_copy_that_is_out_of_step_is_killed_and_its_task_fails(
    make: Callable[..., ResidentExecutor], code: str, text: str
) -> None:
    executor = make(max_executors=1, max_stdout_bytes=1000)
    outcome = await run(executor, code)
    assert (outcome.kind, outcome.stdout) == (ErrorKind.OUTPUT, b"")
    assert text in (outcome.exception or "")
    await until(lambda: not executor.pids, what="the copy is gone")
    assert (await run(executor, "answer()")).kind is None


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ("struct.pack('>I', 2_000_000)", "more than 1000 bytes of stdout"),
        ("struct.pack('>I', 2) + b'{}'", "which is not a valid answer"),
        ("struct.pack('>I', 8) + b'{\"id\":1}'", "no line feed"),
        ("(struct.pack('>I', 9) + b'{\"id\":1}\\n') * 2", "it wrote output without a request"),
        ("struct.pack('>I', 1110) + b'{\"id\":1}\\n' + bytes(1101)", "more than 1000 bytes of stdout"),
    ],
)
async def test_a_frame_that_is_none_is_refused(make: Callable[..., ResidentExecutor], frame: str, text: str) -> None:
    code = f"import struct, sys, time\nsys.stdin.buffer.read(4)\nsys.stdout.buffer.write({frame})\n"
    code += "sys.stdout.flush()\ntime.sleep(60)"
    outcome = await run(make(code, resident={"framing": "length"}, max_stdout_bytes=1000), b"x")
    assert outcome.kind is ErrorKind.OUTPUT
    assert text in (outcome.exception or "")


async def test_words_between_tasks_cost_the_copy_and_no_task(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(max_executors=1)
    code = "answer(); import threading; threading.Timer(0.05, lambda: print('by the way', flush=True)).start()"
    first = await run(executor, code)
    await until(lambda: not executor.pids, what="it is gone")
    second = await run(executor, "answer(stdout='mine')")
    assert second.stdout == b"mine"
    assert second.pid != first.pid


async def test_a_copy_is_recycled_after_its_tasks_and_ends_by_itself(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(ECHO, max_executors=1, resident={"recycle_after_tasks": 3})
    pids = [(await run(executor, "x")).pid for _ in range(9)]
    assert len(set(pids)) == 3
    assert pids == sorted(pids, key=pids.index), "each did its tasks in a row"
    await until(lambda: not executor.pids, what="the last one has ended, without being killed")


async def test_a_recycled_copy_that_does_not_leave_is_killed(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(resident={"recycle_after_tasks": 1}, term_grace_seconds=0.1)
    await run(executor, "answer(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    await until(lambda: not executor.pids, what="it is gone")


async def test_a_program_that_ends_at_once_fails_its_tasks_slowly_and_says_so(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make("import sys; sys.stderr.write('no licence, password=hunter2'); sys.exit(4)")
    started = time.monotonic()
    outcomes = await asyncio.gather(*[begin(executor, "x") for _ in range(5)])
    assert {(outcome.kind, outcome.exit_code) for outcome in outcomes} == {(ErrorKind.EXIT, 4)}
    assert all(outcome.stderr.startswith(b"no licence") for outcome in outcomes)
    assert time.monotonic() - started >= 0.2 + 0.4, "the starts wait longer and longer"
    stalled = executor.describe_wait() or ""
    assert "exited before its first answer" in stalled
    assert "exit code 4: no licence" in stalled
    assert "hunter2" not in stalled


async def test_it_is_no_longer_stalled_once_a_copy_answers(
    make: Callable[..., ResidentExecutor], tmp_path: Any
) -> None:
    flag = tmp_path / "licence"
    executor = make(f"import os, sys\nif not os.path.exists({str(flag)!r}): sys.exit(4)\n{ECHO}")
    assert (await run(executor, "x")).exit_code == 4
    assert executor.describe_wait()
    flag.touch()
    assert (await run(executor, "x")).stdout == b"x"
    assert executor.describe_wait() is None


@pytest.mark.parametrize("program", ["/nonexistent/program", "no-such-program-anywhere"])
async def test_a_missing_program_is_an_outcome_of_kind_missing(
    make: Callable[..., ResidentExecutor], program: str
) -> None:
    executor = make(ECHO, binary_path=program)
    outcomes = await asyncio.gather(*[begin(executor, "x", program=program) for _ in range(5)])
    assert {(outcome.kind, outcome.pid) for outcome in outcomes} == {(ErrorKind.MISSING, None)}


async def test_a_host_without_room_is_not_the_tasks_fault(
    make: Callable[..., ResidentExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(ECHO)

    def full(flags: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe2", full)
    refused = await run(executor, "x")
    assert (refused.kind, refused.exit_code) == (None, None)
    monkeypatch.undo()
    assert (await run(executor, "x")).stdout == b"x"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"env": {"A": "1"}}, "executor.env"),
        ({"stdin": b"\xff"}, "framing to length"),
        ({"timeout_seconds": 0}, "positive number"),
        ({"args": ["\ud800"]}, "surrogates not allowed"),
    ],
)
async def test_a_task_that_cannot_be_asked_of_a_copy_is_an_outcome(
    make: Callable[..., ResidentExecutor], more: dict[str, Any], text: str
) -> None:
    executor = make(ECHO)
    stdin, args = more.pop("stdin", b""), more.pop("args", [])
    outcome = await run(executor, stdin, *args, **more)
    assert (outcome.kind, outcome.pid) == (ErrorKind.EXIT, None)
    assert (outcome.exception or "").startswith("cannot be started: ")
    assert text in (outcome.exception or "")
    assert executor.pids == []


async def test_another_program_is_a_process_of_its_own(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(ECHO)
    outcome = await run(executor, b"\xff", "-c", program="wc", env={"A": "1"})
    assert outcome.stdout.split() == [b"1"]
    assert executor.pids == []


async def test_a_killed_task_is_not_told_and_its_copy_dies_with_its_group(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(max_executors=1)
    marker = f"resident-{time.monotonic_ns()}"
    running = begin(executor, f"import subprocess; subprocess.run(['sh', '-c', 'sleep 63; : {marker}'])")
    waiting, other = begin(executor, "answer(stdout='never')"), begin(executor, "answer(stdout='other')")
    await until(lambda: processes_with(marker), what="it runs")
    await executor.kill([running.handle, waiting.handle], 2.0)  # type: ignore[attr-defined]
    # SIGKILL was sent to the group; the system takes its time to end what the copy had started.
    await until(lambda: not processes_with(marker), what="its group is dead")
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await other).stdout == b"other"
    assert not running.done()
    assert not waiting.done()


async def test_at_the_stop_idle_copies_end_by_themselves_and_busy_ones_are_killed(
    make: Callable[..., ResidentExecutor], tmp_path: Any
) -> None:
    executor = make(OBEY + f"\nopen({str(tmp_path / 'left')!r}, 'w').close()\n")
    busy = begin(executor, "time.sleep(60)")
    await run(executor, "answer()")
    others = children()
    assert len(executor.pids) == 2
    await executor.kill_all(5.0)
    assert (tmp_path / "left").exists(), "the idle copy saw the end of its input"
    assert executor.pids == []
    assert len(children()) <= len(others) - 2
    assert not busy.done()


async def test_copies_carry_the_engines_id_for_the_warden(make: Callable[..., ResidentExecutor]) -> None:
    outcome = await run(make(), "answer(stdout=os.environ['TIDEMILL_ENGINE_ID'])")
    assert outcome.stdout == b"engine-under-test"


class Orders(Handler[bytes, Any]):
    """One task per message, its value as the input."""

    def __init__(self) -> None:
        self.errors: list[ExecutorError] = []

    async def arrange(self, messages, pending):  # type: ignore[no-untyped-def]
        return [ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), stdin=m.value) for m in messages]

    async def on_task_complete(self, result):  # type: ignore[no-untyped-def]
        return CollectResult(files=[FilePayload(path="out", data=result.stdout_bytes)])

    async def on_error(self, task, error):  # type: ignore[no-untyped-def]
        self.errors.append(error)
        return ErrorAction.RETRY


def resident(code: str = OBEY, **more: Any) -> dict[str, Any]:
    return {
        "mode": "resident",
        "binary_path": sys.executable,
        "resident": {"args": ["-I", "-S", "-c", code]},
        "retry_backoff": {"initial_seconds": 0.01},
        **more,
    }


#: The first copy closes its input amid a task, and answers it nevertheless; later ones work.
DEAF = """
import json, os, sys, time
flag = sys.argv[1]
if not os.path.exists(flag):
    open(flag, "w").close()
    os.read(0, 100)
    os.close(0)
    time.sleep(0.5)
    print('{"id": 1, "stdout": "half of it"}', flush=True)
    time.sleep(3600)
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"id": task["id"], "stdout": str(len(task["stdin"]))}), flush=True)
"""


@pytest.mark.parametrize("send_ahead", [0, 3])
async def test_a_copy_that_closed_its_input_is_killed_and_its_tasks_go_to_another(
    rig: Any, tmp_path: Any, send_ahead: int
) -> None:
    handler = Orders()
    settings = resident(DEAF, max_executors=1, task_timeout_seconds=600)
    settings["resident"]["args"].append(str(tmp_path / "flag"))
    settings["resident"]["send_ahead"] = send_ahead
    run = rig(handler, [message(n, b"x" * 1_000_000) for n in range(4)], executor=settings)
    async with asyncio.timeout(DEADLINE_SECONDS * 2):
        await run.committed(4)
    assert [payload.data for payload in run.files.payloads] == [b"1000000"] * 4
    (error,) = handler.errors
    assert error.kind is ErrorKind.EXIT
    assert "closed its input" in (error.exception or "")
    assert run.letters.letters == []


async def test_in_an_engine_the_task_of_a_copy_that_dies_is_retried(rig: Any, tmp_path: Any) -> None:
    flag = repr(str(tmp_path / "tried"))
    once = f"if os.path.exists({flag}): answer(stdout='second')\nelse: open({flag}, 'w'); os._exit(9)"
    handler = Orders()
    values = [b"answer(stdout='fine')", once.encode(), b"answer(stdout='fine')"]
    run = rig(handler, [message(n, value) for n, value in enumerate(values)], executor=resident())
    await run.committed(3)
    assert sorted(payload.data for payload in run.files.payloads) == [b"fine", b"fine", b"second"]
    assert [(error.exit_code, error.kind) for error in handler.errors] == [(9, ErrorKind.EXIT)]
    assert run.letters.letters == []
    summary = await run.end()
    assert summary.progress.tasks_failed == 0


async def test_in_an_engine_a_program_that_ends_at_once_is_dead_lettered_and_shown_as_stalled(rig: Any) -> None:
    run = rig(
        Orders(),
        [message(0)],
        executor=resident("import sys; sys.exit('no model file')", max_retries=1, max_executors=1),
    )
    await run.until(lambda: "resident program" in run.engine.progress().waits)
    assert "no model file" in run.engine.progress().waits["resident program"]
    await run.committed(1)
    (letter,) = run.letters.letters
    assert "exited (exit code 1) before it answered" in letter.error
    await run.end()


async def test_a_drain_lets_tasks_finish_and_leaves_no_copy(rig: Any) -> None:
    handler = Orders()
    values = [b"time.sleep(0.3); answer(stdout='done')"] * 3
    run = rig(handler, [message(n, value) for n, value in enumerate(values)], executor=resident(max_executors=2))
    await run.until(lambda: run.engine.progress().tasks_running == 2)
    await run.end()
    assert run.source.committed[P0] == 3
    assert len(run.files.payloads) == 3


async def test_a_drain_that_takes_too_long_kills_the_copies_and_commits_what_is_done(rig: Any) -> None:
    values = [b"answer()", b"time.sleep(60)"]
    run = rig(
        Orders(),
        [message(n, value) for n, value in enumerate(values)],
        executor=resident(max_executors=2, drain_timeout_seconds=0.2, term_grace_seconds=0.2),
    )
    await run.committed(1)
    started = time.monotonic()
    await run.end()
    assert time.monotonic() - started < slack(5)
    assert run.source.committed[P0] == 1
    assert run.letters.letters == []


async def test_the_copies_of_a_partition_that_is_lost_die_and_the_others_continue(rig: Any) -> None:
    marker = f"resident-{time.monotonic_ns()}"
    stuck = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 64; : {marker}']); answer(stdout='late')"
    run = rig(Orders(), [message(0, stuck.encode()), message(0, b"answer(stdout='mine')", 1)], executor=resident())
    await run.until(lambda: processes_with(marker))
    await run.committed(1, P1)
    run.source.lose(P0)
    await run.until(lambda: not processes_with(marker))
    run.source.feed(message(1, b"answer(stdout='more')", 1))
    await run.committed(2, P1)
    assert sorted(payload.data for payload in run.files.payloads) == [b"mine", b"more"]
    await run.end()


ENGINE = """
import asyncio, sys
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.process.warden import Warden
async def main():
    Warden(sys.argv[1], 0.0).start()
    copies = {"args": ["-c", "sleep 65 & cat; sleep 66"]}
    settings = ExecutorSettings(mode="resident", binary_path="sh", resident=copies)
    executor = build_executor(settings, sys.argv[1])
    executor.open()
    for _ in range(3):
        executor.start(("sh",), b"x", {}, 600.0, print)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_warden_ends_the_copies_of_a_killed_engine() -> None:
    engine_id = f"engine-{time.monotonic_ns()}"
    process = subprocess.Popen([sys.executable, "-c", ENGINE, engine_id], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    await until(lambda: len(marked(engine_id)) >= 6, what="copies and grandchildren are up")
    process.kill()
    process.wait()
    process.stdout.close()
    await until(lambda: not marked(engine_id), what="all of them are gone")


def test_the_mode_resident_needs_a_program() -> None:
    with pytest.raises(ValueError, match="set binary_path too"):
        ExecutorSettings(mode="resident")


async def test_tasks_sent_ahead_are_answered_in_order_by_few_copies(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(ECHO, resident={"send_ahead": 8})
    assert executor.capacity == 18
    await run(executor, "first")
    outcomes = await asyncio.gather(*[begin(executor, str(n) * 3000) for n in range(18)])
    assert [outcome.stdout.decode() for outcome in outcomes] == [str(n) * 3000 for n in range(18)]
    assert len(executor.pids) == 2


#: Answers together what it reads together, each task with how many there were; before that, one task and then eight.
COUNT = """
import json, os
def answer(tasks):
    texts = [json.dumps({"id": json.loads(task)["id"], "stdout": str(len(tasks))}) for task in tasks]
    os.write(1, "".join(text + "\\n" for text in texts).encode())
def read():
    return os.read(0, 1 << 16).splitlines()
answer(read())
eight = []
while len(eight) < 8:
    eight += read()
answer(eight)
while tasks := read():
    answer(tasks)
"""


async def test_what_follows_answers_that_came_together_is_sent_together(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(COUNT, max_executors=1, resident={"send_ahead": 7})
    await run(executor, "first")
    following: list[asyncio.Future[ProcessOutcome]] = []
    for n in range(8):
        executor.start(
            (sys.executable,), b"%d" % n, {}, DEADLINE_SECONDS, lambda _: following.append(begin(executor, "next"))
        )
    await until(lambda: len(following) == 8, what="the eight are answered")
    outcomes = await asyncio.wait_for(asyncio.gather(*following), DEADLINE_SECONDS)
    assert [outcome.stdout for outcome in outcomes] == [b"8"] * 8


async def test_tasks_sent_together_to_a_copy_that_ended_while_it_was_idle_go_to_another(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(OBEY, max_executors=2, resident={"send_ahead": 3})
    pids = {outcome.pid for outcome in await asyncio.gather(*[begin(executor, "answer()") for _ in range(2)])}
    assert len(pids) == 2
    over: list[ProcessOutcome] = []

    def take(outcome: ProcessOutcome) -> None:
        (other,) = pids - {outcome.pid}
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody here knows yet
        for n in range(6):
            executor.start((sys.executable,), b"answer(stdout='%d')" % n, {}, DEADLINE_SECONDS, over.append)

    executor.start((sys.executable,), b"answer()", {}, DEADLINE_SECONDS, take)
    await until(lambda: len(over) == 6, what="all of them are answered")
    assert [(outcome.kind, outcome.stdout) for outcome in sorted(over, key=lambda each: each.stdout)] == [
        (None, b"%d" % n) for n in range(6)
    ]


async def test_a_task_does_not_pay_for_a_copy_that_ended_before_its_request_was_written(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(OBEY, max_executors=2, resident={"send_ahead": 3})
    pids = {outcome.pid for outcome in await asyncio.gather(*[begin(executor, "answer()") for _ in range(2)])}
    over: list[ProcessOutcome] = []

    def follow(outcome: ProcessOutcome) -> None:
        over.append(outcome)
        executor.start((sys.executable,), b"answer(stdout='mine')", {}, DEADLINE_SECONDS, over.append)

    executor.start((sys.executable,), b"time.sleep(60)", {}, DEADLINE_SECONDS, follow)
    await asyncio.sleep(0)  # its request is written
    (busy,) = [copy.process.pid for copy in executor._alive if copy.jobs and copy.process]
    for pid in sorted(pids, key=lambda pid: pid != busy):  # both at once, and the idle one is seen after the other
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    await until(lambda: len(over) == 2, what="both tasks are over")
    assert [outcome.kind for outcome in over] == [ErrorKind.EXIT, None]
    assert over[1].stdout == b"mine"


async def test_words_of_a_copy_that_has_not_been_asked_yet_cost_no_task(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(OBEY, max_executors=1, resident={"send_ahead": 3})
    code = "answer(); time.sleep(0.1); print(json.dumps({'id': 2, 'stdout': 'a guess'}), flush=True)"
    first = await run(executor, code)
    (copy,) = executor._alive
    assert select.select([copy.stdout_fd], [], [], DEADLINE_SECONDS)[0], "the words are there, and nobody has read them"
    second = begin(executor, "answer(stdout='mine')")
    executor._read(copy)  # as if they had come in the turn in which the task was given
    outcome = await asyncio.wait_for(second, DEADLINE_SECONDS)
    assert (outcome.kind, outcome.stdout) == (None, b"mine")
    assert outcome.pid != first.pid


async def test_tasks_whose_requests_the_system_refuses_to_write_go_to_another_copy(
    make: Callable[..., ResidentExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(OBEY, max_executors=2, resident={"send_ahead": 3})
    await asyncio.gather(*[begin(executor, "answer()") for _ in range(2)])
    writev, refused = os.writev, [OSError(errno.ENOMEM, "out of memory")]

    def write(fd: int, requests: Any) -> int:
        if refused:
            raise refused.pop()
        return writev(fd, requests)

    monkeypatch.setattr(os, "writev", write)
    tasks = [begin(executor, f"answer(stdout='{n}')") for n in range(6)]
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_SECONDS)
    assert [outcome.stdout for outcome in outcomes] == [b"%d" % n for n in range(6)]


async def test_only_the_task_that_a_copy_works_on_pays_for_its_end(make: Callable[..., ResidentExecutor]) -> None:
    executor = make(max_executors=1, resident={"send_ahead": 3})
    await run(executor, "answer()")
    fatal = begin(executor, "time.sleep(0.2); os._exit(5)")
    slow = begin(executor, "time.sleep(60)", timeout_seconds=0.3)
    rest = [begin(executor, "answer(stdout=task['id'])") for _ in range(2)]
    outcomes = await asyncio.wait_for(asyncio.gather(fatal, slow, *rest), DEADLINE_SECONDS)
    assert [outcome.kind for outcome in outcomes] == [ErrorKind.EXIT, ErrorKind.TIMEOUT, None, None]
    assert [outcome.stdout for outcome in outcomes[2:]] == [b"4", b"5"]
    assert 0.3 <= outcomes[1].duration_seconds < 10, "its clock runs from when it was worked on"


async def test_a_task_behind_one_that_is_killed_is_done_by_another_copy(
    make: Callable[..., ResidentExecutor],
) -> None:
    executor = make(max_executors=1, resident={"send_ahead": 2})
    await run(executor, "answer()")
    first, second, third = [begin(executor, code) for code in ("time.sleep(60)", "answer()", "answer(stdout='mine')")]
    await executor.kill([second.handle], 1.0)  # type: ignore[attr-defined]
    await executor.kill([first.handle], 1.0)  # type: ignore[attr-defined]
    assert (await asyncio.wait_for(third, DEADLINE_SECONDS)).stdout == b"mine"
    assert not first.done()
    assert not second.done()


async def test_with_send_ahead_no_task_may_be_another_program(make: Callable[..., ResidentExecutor]) -> None:
    outcome = await run(make(ECHO, resident={"send_ahead": 1}), "x", program="wc")
    assert (outcome.kind, outcome.pid) == (ErrorKind.EXIT, None)
    assert "send_ahead" in (outcome.exception or "")
