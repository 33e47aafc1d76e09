"""Attempts in real task processes: how they end, and what is said of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.services.worker.conftest import RunningWorker, StartWorker
from tests.services.worker.memory_store import make_attempt
from tests.until import until

from tidemill.core.errors import InvariantError
from tidemill.core.tasks.endings import Deferral, Failure, Loss, Skip, Success
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.dags.loading import digest_files
from tidemill.runtime.process.table import is_running
from tidemill.services.worker import worker as worker_module
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.worker_calls import ResumeWith

#: A DAG whose tasks do what their names say.
HEAD = """
import ctypes, os, signal, sys, threading, time, subprocess, logging
with DAG("d", schedule=None) as dag:
    @task
    def run(ti=None):
        BODY
    run()
"""


#: Changes what another task of the file would find in its process, and returns what it has found itself.
LEAVES_STATE = """
import decimal, signal, socket, sys
SEEN = []

class Query:
    template_fields = ("sql",)
    def __init__(self, sql):
        self.sql = sql

class Leaves(BaseOperator):
    template_fields = ("query",)
    def __init__(self, *, steps, query, **kwargs):
        super().__init__(**kwargs)
        self.steps, self.query = steps, query
    def execute(self, context):
        SEEN.append(1)
        self.steps.append(1)
        found = [
            len(SEEN), len(self.steps), self.query.sql, socket.getdefaulttimeout(), decimal.getcontext().prec,
            "/nowhere" in sys.path, signal.getitimer(signal.ITIMER_REAL)[0],
        ]
        socket.setdefaulttimeout(0.001)
        decimal.getcontext().prec = 3
        sys.path.append("/nowhere")
        signal.alarm(600)
        return found

with DAG("d", schedule=None):
    Leaves(task_id="leaves", steps=[], query=Query("{{ ti.task_id }} {{ ti.try_number }}"))
"""


def with_body(body: str) -> str:
    return HEAD.replace("BODY", body.strip().replace("\n", "\n        "))


async def make(worker: RunningWorker, body: str, number: int = 1, **changes: object) -> None:
    worker.write(with_body(body))
    worker.store.queue(make_attempt(number, "run", **changes))


async def test_an_attempt_succeeds_with_what_it_returned(worker: RunningWorker) -> None:
    await make(worker, "return {'a': 1}")
    report = await worker.report(1)
    assert isinstance(report.result, Success)
    assert report.xcoms == (("return_value", '{"a":1}'),)
    assert (report.task, report.epoch) == (1, 3)


async def test_an_attempt_asks_the_store(worker: RunningWorker) -> None:
    worker.store.variables["name"] = "Ann"
    await make(worker, "ti.xcom_push('greeting', 'hello ' + Variable.get('name'))")
    assert isinstance((await worker.report(1)).result, Success)
    assert worker.store.xcoms == {"greeting": '"hello Ann"'}


async def test_what_the_store_refuses_is_an_error_in_the_task(worker: RunningWorker) -> None:
    worker.write(with_body("ti.xcom_push('a', 1)"))
    worker.store.queue(make_attempt(1, "run"))
    assert isinstance((await worker.report(1)).result, Success)
    worker.store.queue(make_attempt(-7, "run"))
    assert "has been replaced" in await worker.error(-7)


@pytest.mark.parametrize(
    ("fault", "may_retry"),
    [
        pytest.param(CallRefusedError(RefusalKind.INVALID, "element 0 differs"), False, id="refusal"),
        pytest.param(InvariantError("a fault of the store"), True, id="known fault"),
        pytest.param(KeyError("a fault of the worker"), True, id="unknown fault"),
    ],
)
async def test_a_value_that_the_store_refuses_is_a_final_failure_but_a_fault_of_tidemill_is_none(
    worker: RunningWorker, fault: Exception, may_retry: bool
) -> None:
    worker.store.fault = fault
    await make(worker, "yield 1")
    result = (await worker.report(1)).result
    assert isinstance(result, Failure)
    assert result.may_retry is may_retry
    assert str(fault.args[0]) in result.error


async def test_an_attempt_that_raises_fails_with_its_traceback_in_the_log(worker: RunningWorker) -> None:
    await make(worker, "raise ValueError('wrong')")
    assert await worker.error(1) == "ValueError: wrong"
    text = worker.store.text_of(1)
    assert "Traceback" in text
    assert 'd.py", line' in text


async def test_skips_and_failures_without_retry_are_told_apart(worker: RunningWorker) -> None:
    await make(worker, "raise AirflowSkipException('no')")
    assert isinstance((await worker.report(1)).result, Skip)
    worker.write(with_body("raise AirflowFailException('never again')"))
    worker.store.queue(make_attempt(2, "run"))
    result = (await worker.report(2)).result
    assert result.may_retry is False  # type: ignore[union-attr]


DEFERRING = """
from datetime import timedelta
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger
class Wait(BaseOperator):
    def execute(self, context):
        trigger = TimeDeltaTrigger(timedelta(seconds=5))
        self.defer(trigger=trigger, method_name="go_on", kwargs={"a": 1}, timeout=timedelta(seconds=9))
    def go_on(self, context, a, event):
        return [a, event]
with DAG("d", schedule=None):
    Wait(task_id="run")
"""


async def test_an_attempt_defers_and_another_one_continues(worker: RunningWorker) -> None:
    worker.write(DEFERRING)
    worker.store.queue(make_attempt(1, "run"))
    result = (await worker.report(1)).result
    assert isinstance(result, Deferral), result
    assert (result.method, result.method_kwargs, result.timeout_us) == ("go_on", '{"a":1}', 9_000_000)
    worker.store.queue(make_attempt(2, "run", resume=ResumeWith("go_on", '{"a":1}', '"x"')))
    assert (await worker.report(2)).xcoms == (("return_value", '[1,"x"]'),)


@pytest.mark.parametrize(
    ("small", "large", "error"),
    [
        ('"a": 1', '"a": "x" * 1_100_000', "the kwargs of the deferral have 1,100,008 bytes"),
        ("TimeDeltaTrigger(timedelta(seconds=5))", 'FileTrigger("x" * 1_100_000)', "the trigger's arguments have 1,1"),
    ],
)
async def test_a_deferral_that_is_too_large_to_be_stored_fails_the_attempt_by_name(
    worker: RunningWorker, small: str, large: str, error: str
) -> None:
    worker.write("from tidemill.triggers.builtin.file import FileTrigger\n" + DEFERRING.replace(small, large))
    worker.store.queue(make_attempt(1, "run"))
    assert error in (told := await worker.error(1))
    assert told.endswith("at most 1,048,576 are stored; store a reference")


async def test_a_file_that_does_not_import_fails_its_attempts(worker: RunningWorker) -> None:
    worker.write("1 / 0")
    worker.store.queue(make_attempt(1, "run"))
    assert await worker.error(1) == "d.py cannot be imported: ZeroDivisionError: division by zero"
    assert "Traceback" in worker.store.text_of(1)
    worker.write(with_body("return 1"))
    worker.store.queue(make_attempt(2, "run"))
    assert isinstance((await worker.report(2)).result, Success)


async def test_a_task_or_dag_that_is_gone_is_named(worker: RunningWorker) -> None:
    worker.write(with_body("return 1"))
    worker.store.queue(make_attempt(2, "other"))
    assert "no longer has a task 'other'" in await worker.error(2)
    worker.store.queue(make_attempt(3, "run", dag_id="e"))
    assert "no longer defines a DAG 'e'" in await worker.error(3)


async def test_what_a_task_does_to_its_process_is_its_own_failure(worker: RunningWorker) -> None:
    harms = [
        ("os._exit(0)", "ended its process with exit code 0"),
        ("os._exit(5)", "ended its process with exit code 5"),
        ("sys.exit(4)", "called sys.exit(4)"),
        ("os.execvp('true', ['true'])", "ended its process with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "ended by SIGTERM, which tidemill did not send"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed (SIGKILL), not by tidemill"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "SIGINT"),
        ("ctypes.string_at(0)", "crashed (SIGSEGV)"),
        ("f = lambda: f()\nf()", "RecursionError"),
        ("os.closerange(3, 100); time.sleep(60)", "closed the connection"),
        ("return object()", "the returned value"),
        ("return 'x' * 1_100_000", "at most 1,048,576 are stored"),
        ("raise ValueError('\\udcff')", "ValueError: \\udcff"),
    ]
    for number, (body, said) in enumerate(harms):
        await make(worker, body, 2 * number + 1)
        assert said in await worker.error(2 * number + 1), body
        await make(worker, "return os.getpid()", 2 * number + 2)
        assert isinstance((await worker.report(2 * number + 2)).result, Success), body


LEFT = [
    ("p = subprocess.Popen(['sleep', '600'])\nreturn p.pid", "sleep 600 ("),
    # What detaches itself, as gpg-agent, `git gc --auto` and ssh's ControlPersist do.
    (
        "subprocess.run(['bash', '-c', 'setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $! > pid'], check=True)\n"
        "return int(open('pid').read())",
        "sleep 600 (",
    ),
    (
        "global POOL\nfrom concurrent.futures import ProcessPoolExecutor\nPOOL = ProcessPoolExecutor(1)\n"
        "return POOL.submit(os.getpid).result()",
        "a fork of the task's own process (",
    ),
    (
        "global POOL\nimport multiprocessing\nPOOL = multiprocessing.get_context('fork').Pool(1)\n"
        "return POOL.apply(os.getpid)",
        "a fork of the task's own process (",
    ),
    (
        "import signal\np = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo; sleep 600'], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\nreturn p.pid",
        "sh -c",
    ),
]


@pytest.mark.parametrize(("body", "name"), LEFT, ids=["child", "daemon", "executor", "pool", "stubborn"])
@pytest.mark.parametrize("reuse_processes", [(), ("*",)], ids=["own", "reused"])
async def test_processes_that_a_task_leaves_are_ended_and_named_and_its_result_stands(
    start_worker: StartWorker, reuse_processes: tuple[str, ...], body: str, name: str
) -> None:
    worker = await start_worker(reuse_processes=reuse_processes)
    await make(worker, f"os.chdir({str(worker.folder)!r})\n{body}")
    report = await worker.report(1)
    assert isinstance(report.result, Success), report
    await until(lambda: not is_running(int(report.xcoms[0][1])), what="what it left has ended")
    said = await until(lambda: worker.store.text_of(1))
    assert "the task left 1 process that it had started: " in said
    assert name in said
    await make(worker, "return 'next'", 2)
    assert isinstance((await worker.report(2)).result, Success)


async def test_a_child_that_the_task_forks_does_not_report(worker: RunningWorker) -> None:
    await make(worker, "pid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nreturn 'parent' if pid else 'child'")
    assert (await worker.report(1)).xcoms == (("return_value", '"parent"'),)


async def test_an_attempt_finds_nothing_that_another_one_left_in_its_process(worker: RunningWorker) -> None:
    worker.write(LEAVES_STATE)
    for number in range(1, 5):
        worker.store.queue(make_attempt(number, "leaves", try_number=number))
        found = json.loads((await worker.report(number)).xcoms[0][1])
        assert found == [1, 1, f"leaves {number}", None, 28, False, 0.0]


async def test_a_process_that_is_not_as_before_is_not_used_again(start_worker: StartWorker) -> None:
    worker = await start_worker(reuse_processes=("d",))
    bodies = [
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "os.chdir('/')",
        "os.environ['SEEN'] = '1'",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "os.umask(0o77)",
        "os.close(1)",
        "signal.alarm(600)",
        "import socket; socket.setdefaulttimeout(0.001)",
        "import decimal; decimal.getcontext().prec = 3",
        "import sys; sys.path.append('/nowhere')",
        "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    ]
    pid = "os.getppid() and os.getpid()"
    for number, body in enumerate(bodies):
        await make(worker, f"seen = {pid}\n{body}\nreturn seen", 2 * number + 1)
        first = (await worker.report(2 * number + 1)).xcoms
        await make(worker, f"return {pid}", 2 * number + 2)
        assert (await worker.report(2 * number + 2)).xcoms != first, body


async def test_attempts_of_a_dag_that_reuses_processes_share_one_until_it_is_recycled(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(WorkerLimits(concurrency=1, recycle_after=10), reuse_processes=("other", "d*"))
    worker.write(with_body("return os.getpid()"))
    worker.store.queue(*(make_attempt(number, "run") for number in range(1, 31)))
    pids = [(await worker.report(number)).xcoms for number in range(1, 31)]
    assert len(set(pids)) >= 3
    assert all(pids.count(pid) <= 10 for pid in pids)
    assert pids[0] == pids[1]


async def test_a_file_that_was_saved_is_imported_again_by_what_it_imports_too(worker: RunningWorker) -> None:
    (worker.folder / "helper.py").write_text("VALUE = 1")
    worker.write("import helper\n" + with_body("return helper.VALUE"))
    worker.store.queue(make_attempt(1, "run"))
    assert (await worker.report(1)).xcoms == (("return_value", "1"),)
    (worker.folder / "helper.py").write_text("VALUE = 22")
    worker.store.queue(make_attempt(2, "run"))
    assert (await worker.report(2)).xcoms == (("return_value", "22"),)


# -- interruptions -----------------------------------------------------------------------------------------------------

KILLABLE = """
import os, time
class Sleep(BaseOperator):
    def execute(self, context):
        CODE
    def on_kill(self):
        print("on_kill was called")
with DAG("d", schedule=None):
    Sleep(task_id="run")
"""


def soon() -> int:
    import time

    return time.time_ns() // 1000 + 700_000


async def test_a_task_that_takes_too_long_is_interrupted_and_on_kill_called(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "time.sleep(60)"))
    worker.store.queue(make_attempt(1, "run", deadline_us=soon()))
    assert (await worker.error(1)).startswith("TaskTimeout: ")
    assert "on_kill was called" in worker.store.text_of(1)


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n            try: time.sleep(60)\n            except BaseException: pass",
        "import sqlite3; sqlite3.connect(':memory:').execute("
        "'WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n').fetchall()",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(60)",
    ],
)
async def test_on_kill_is_called_where_the_task_cannot_be_interrupted(start_worker: StartWorker, code: str) -> None:
    worker = await start_worker(WorkerLimits(concurrency=1, grace_seconds=4.0))
    worker.write(KILLABLE.replace("CODE", code))
    worker.store.queue(make_attempt(1, "run", deadline_us=soon()))
    assert "was killed" in await worker.error(1)
    assert worker.store.text_of(1).count("on_kill was called") == 1


@pytest.mark.parametrize("then", ["return 5", "raise ValueError('other')"])
async def test_on_kill_is_called_where_the_task_swallows_its_timeout_and_ends(worker: RunningWorker, then: str) -> None:
    worker.write(KILLABLE.replace("CODE", f"try: time.sleep(60)\n        except BaseException: {then}"))
    worker.store.queue(make_attempt(1, "run", deadline_us=soon()))
    await until(lambda: 1 in worker.store.reports, what="it has ended")
    assert worker.store.text_of(1).count("on_kill was called") == 1


@pytest.mark.parametrize(
    "code",
    [
        "import collections, itertools; collections.deque(itertools.repeat(1), maxlen=0)",  # with the GIL held
        "while True:\n            try: time.sleep(60)\n            except BaseException: pass",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(60)",
    ],
)
async def test_a_task_that_cannot_be_interrupted_is_killed(worker: RunningWorker, code: str) -> None:
    worker.write(KILLABLE.replace("CODE", code))
    worker.store.queue(make_attempt(1, "run", deadline_us=soon()))
    assert "did not end within 0.5 s, and was killed" in await worker.error(1)


async def test_an_import_that_takes_too_long_is_interrupted(worker: RunningWorker) -> None:
    worker.write("import time; time.sleep(60)")
    worker.store.queue(make_attempt(1, "run", deadline_us=soon()))
    assert "TaskTimeout" in await worker.error(1)


async def test_an_import_that_takes_longer_than_it_may_is_killed_and_says_which_setting(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(WorkerLimits(concurrency=1, import_seconds=2.0))
    worker.write("import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass")
    worker.store.queue(make_attempt(1, "run"))
    assert await worker.error(1) == (
        "importing d.py took longer than 2 s, twice dags.parse_timeout_seconds, so its process was killed; move slow "
        "work into tasks, or raise dags.parse_timeout_seconds"
    )


async def test_an_attempt_whose_task_has_moved_on_is_ended_without_a_report(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(60)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    pid, *_ = worker.worker.processes.pids
    worker.store.end(1)
    await until(lambda: not worker.worker.processes.running, what="it is ended")
    await until(lambda: "on_kill was called" in worker.store.text_of(1), what="on_kill was called")
    assert not worker.store.reports
    await until(lambda: not worker.store.turns[-1].held, what="the worker holds it no more")
    assert pid not in worker.worker.processes.pids, "until its process had ended, the worker held it"


async def test_callbacks_run_in_attempts_of_their_own(worker: RunningWorker) -> None:
    from tidemill.store.calls.worker_calls import ClaimedCallback

    worker.write(
        "def told(context): print('it said', context['exception'])\n"
        + "def wrong(context): raise ValueError('oh')\n"
        + "with DAG('d', schedule=None):\n"
        + "    EmptyOperator(task_id='run', on_failure_callback=told, on_success_callback=wrong)\n"
    )
    worker.store.queue(make_attempt(1, "run", callback=ClaimedCallback(7, "on_failure", "boom", 1, "failed")))
    worker.store.queue(make_attempt(1, "run", callback=ClaimedCallback(8, "on_success", None, 1, "failed")))
    await until(lambda: len(worker.store.callbacks) == 2, what="both have ended")
    assert worker.store.callbacks[7].error is None
    assert "oh" in (worker.store.callbacks[8].error or "")
    assert "it said boom" in worker.store.text_of(1, 0)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("context['ti'].xcom_push('a', 1)", "push an XCom"),
        ("context['task_state_store'].get('a')", "use the task state"),
    ],
)
async def test_a_callback_is_told_what_only_attempts_can_do(worker: RunningWorker, call: str, what: str) -> None:
    from tidemill.store.calls.worker_calls import ClaimedCallback

    worker.write(
        f"def told(context): {call}\n"
        + "with DAG('d', schedule=None):\n"
        + "    EmptyOperator(task_id='run', on_failure_callback=told)\n"
    )
    worker.store.queue(make_attempt(1, "run", callback=ClaimedCallback(7, "on_failure", "boom", 1, "failed")))
    await until(lambda: 7 in worker.store.callbacks, what="it has ended")
    assert f"a callback cannot {what}: its task has ended; do it in the task" in (worker.store.callbacks[7].error or "")


# -- the worker --------------------------------------------------------------------------------------------------------


async def test_a_worker_that_drains_lets_attempts_end_and_claims_nothing(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(0.5)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    worker.worker.drain()
    worker.store.queue(make_attempt(2, "run"))
    await worker.running
    assert isinstance(worker.store.reports[1].result, Success)
    assert 2 not in worker.store.reports
    assert worker.store.parts[(1, 1)]


@pytest.mark.long
async def test_a_worker_that_drains_gives_back_an_attempt_that_runs_elements(worker: RunningWorker) -> None:
    worker.write("""
import time

with DAG("d", schedule=None) as dag:
    @task(task_concurrency=1)
    def wait(x):
        time.sleep(0.05)
    wait.iterate(x=list(range(10_000)))
""")
    worker.store.elements = 10_000
    worker.store.queue(make_attempt(1, "wait", map_index=0))
    await until(lambda: worker.store.ended_elements, what="elements run")
    worker.worker.drain()
    assert (await worker.report(1)).result == Loss(is_return=True)
    await worker.running
    assert len(worker.store.ended_elements) < 10_000


async def test_a_report_of_a_damaged_run_is_sent_again(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "UNSTORED_SECONDS", 0.01)
    worker.write("with DAG('d', schedule=None):\n    EmptyOperator(task_id='run')\n")
    worker.store.unstored = 2
    worker.store.queue(make_attempt(1, "run"))
    assert (await worker.report(1)).result == Success()


async def test_a_draining_worker_that_is_rung_claims_nothing_and_reports_what_ends(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(0.5)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    worker.worker.drain()
    turns = len(worker.store.turns)
    for number in range(2, 5):
        seen = len(worker.store.turns)
        worker.store.queue(make_attempt(number, "run"))
        await until(lambda seen=seen: len(worker.store.turns) > seen or worker.running.done())
    await worker.running
    assert {turn.capacity for turn in worker.store.turns[turns:]} == {0}
    assert worker.store.reports.keys() == {1}
    assert [one.task for one in worker.store.waiting] == [2, 3, 4]


async def test_a_report_whose_answer_is_lost_is_stored_once_and_its_turn_starts_nothing_twice(
    worker: RunningWorker,
) -> None:
    worker.store.losing = 2  # that of the claim, and that of the report
    await make(worker, "return 1")
    assert (await worker.report(1)).xcoms == (("return_value", "1"),)
    await until(lambda: not worker.store.losing, what="the report was repeated")
    worker.store.queue(make_attempt(2, "run"))
    await worker.report(2)
    numbers = [turn.request for turn in worker.store.turns]
    assert len(numbers) - len(set(numbers)) == 2, "turns without an answer are repeated under their number"
    assert sum(report.task == 1 for turn in worker.store.turns for report in turn.reports) == 2


async def test_a_worker_that_was_cut_off_reports_when_it_can_and_kills_what_was_fenced(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = await start_worker()
    worker.write(
        f"import os, time\nFOLDER = {str(tmp_path)!r}\n"
        "with DAG('d', schedule=None):\n"
        "    for name in ('goes_on', 'fenced'):\n"
        "        @task(task_id=name)\n"
        "        def run(ti=None):\n"
        "            print('begun', flush=True)\n"
        "            while not os.path.exists(os.path.join(FOLDER, ti.task_id + '.go')): time.sleep(0.02)\n"
        "            return ti.fencing_token\n"
        "        run()\n"
    )
    worker.store.queue(make_attempt(1, "goes_on", epoch=7), make_attempt(2, "fenced", epoch=3))
    for number in (1, 2):
        await until(lambda number=number: "begun" in worker.store.text_of(number), what="both have begun")
    worker.store.away = True
    await until(lambda: worker.store.refused["WorkerTurn"], what="it is cut off")
    (tmp_path / "goes_on.go").touch()
    await until(lambda: worker.worker.processes.running == 1, what="its attempt goes on and ends")
    assert not worker.store.reports
    worker.store.end(2)  # another worker has it
    worker.store.away = False
    assert (await worker.report(1)).xcoms == (("return_value", "7"),), "the fencing token is that of the claim"
    await until(lambda: not worker.worker.processes.running, what="what was fenced is killed")
    assert worker.store.reports.keys() == {1}


async def test_what_still_runs_at_the_end_is_given_back(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(60)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    worker.worker.end_all()
    await worker.running
    assert isinstance(worker.store.reports[1].result, Loss)
    assert "on_kill was called" in worker.store.text_of(1)
    assert not worker.worker.processes.pids


async def test_attempts_run_on_while_the_store_is_away(worker: RunningWorker) -> None:
    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(0.5); return 5"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    worker.store.away = True
    await until(lambda: not worker.worker.processes.running, what="it has ended")
    worker.store.away = False
    assert (await worker.report(1)).xcoms == (("return_value", "5"),)


ASKING = """
import time
from pathlib import Path
class Asks(BaseOperator):
    def execute(self, context):
        Path(r"GO").with_name("begun").touch()
        while not Path(r"GO").exists(): time.sleep(0.005)
        CODE
with DAG("d", schedule=None):
    Asks(task_id="run")
"""


async def test_what_a_task_asks_while_the_store_is_away_is_answered_once_it_is_back(
    worker: RunningWorker, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    worker.write(ASKING.replace("GO", str(go)).replace("CODE", "return Variable.get('a')"))
    worker.store.variables["a"] = "5"
    worker.store.queue(make_attempt(1, "run"))
    await until((tmp_path / "begun").exists)
    worker.store.away = True
    go.touch()
    await until(lambda: worker.store.refused["GetVariable"] >= 2, what="it was asked again")
    worker.store.away = False
    assert (await worker.report(1)).xcoms == (("return_value", '"5"'),)


async def test_what_a_task_asked_is_not_done_once_its_attempt_is_over(worker: RunningWorker, tmp_path: Path) -> None:
    go = tmp_path / "go"
    worker.write(ASKING.replace("GO", str(go)).replace("CODE", "Variable.set('a', 'late')"))
    worker.store.queue(make_attempt(1, "run", deadline_us=soon() + 3_000_000))
    await until((tmp_path / "begun").exists)
    worker.store.away = True
    go.touch()
    await until(lambda: worker.store.refused["SetVariable"] >= 2, what="it was asked again")
    await until(lambda: not worker.worker.processes.running, what="it was interrupted")
    worker.store.away = False
    assert "TaskTimeout" in await worker.error(1)
    worker.store.queue(make_attempt(2, "run"))
    go.unlink()
    await until(lambda: (2, 3) in worker.store.claimed)
    assert "a" not in worker.store.variables


async def test_a_worker_whose_service_has_ended_ends_everything(worker: RunningWorker) -> None:
    from tidemill.services.worker.store_link import WorkerFencedError

    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(60)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    worker.store.ended = True
    with pytest.raises(WorkerFencedError):
        await worker.running
    assert not worker.worker.processes.pids
    assert not worker.store.reports


async def test_an_attempt_whose_zygote_dies_is_lost(worker: RunningWorker) -> None:
    import os

    worker.write(KILLABLE.replace("CODE", "print('begun', flush=True); time.sleep(60)"))
    worker.store.queue(make_attempt(1, "run"))
    await until(lambda: "begun" in worker.store.text_of(1), what="it has begun")
    os.kill(worker.zygote.pid or 0, signal.SIGKILL)
    assert isinstance((await worker.report(1)).result, Loss)
    worker.write(with_body("return 2"))
    worker.store.queue(make_attempt(2, "run"))
    assert isinstance((await worker.report(2)).result, Success)


async def test_a_worker_that_lacks_a_file_returns_its_attempts_and_says_so_until_it_is_there(
    worker: RunningWorker,
) -> None:
    worker.store.queue(make_attempt(1, "run", file="later.py"))
    report = await worker.report(1)
    assert report.result == Loss(is_return=True)
    await until(lambda: worker.store.turns[-1].missing == ("later.py",), what="the file is missing")
    worker.write(with_body("return 1"), "later.py")
    await until(lambda: worker.store.turns[-1].missing == (), what="the file is there")
    worker.store.queue(make_attempt(2, "run", file="later.py"))
    assert isinstance((await worker.report(2)).result, Success)


async def test_an_attempt_says_in_its_log_that_its_file_differs_from_the_stored_one(worker: RunningWorker) -> None:
    await make(worker, "return 1", digest="of another host")
    assert isinstance((await worker.report(1)).result, Success)
    assert "d.py on this host differs" in worker.store.text_of(1)
    digest = digest_files(worker.folder, ["d.py"])
    worker.store.queue(make_attempt(2, "run", digest=digest))
    assert isinstance((await worker.report(2)).result, Success)
    assert worker.store.text_of(2) == ""
    assert worker.store.files == [((), ("d.py",)), ((), ())]
