"""Processes that have imported a DAG file, and fork those that run attempts of it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.services.worker.conftest import RunningWorker, StartWorker
from tests.services.worker.memory_store import make_attempt
from tests.until import until

from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.runtime.process.table import is_running
from tidemill.services.worker.processes import templates
from tidemill.services.zygote import link

#: Notes each import, and returns the number of its process.
FILE = """
import os, time
from pathlib import Path
with open(Path(__file__).parent / "imports.txt", "a") as imports:
    imports.write(f"{os.getpid()}\\n")
FIRST_LINES
with DAG("d", schedule=None):
    @task
    def run():
        BODY
        return os.getpid()
    run()
"""
LIMITS = WorkerLimits(concurrency=1, recycle_after=5, grace_seconds=0.5)


def write(worker: RunningWorker, first_lines: str = "", body: str = "pass") -> None:
    worker.write(FILE.replace("FIRST_LINES", first_lines).replace("BODY", body))


def list_imports(worker: RunningWorker) -> list[str]:
    return Path(worker.folder, "imports.txt").read_text().split()


async def run(worker: RunningWorker, first: int, last: int) -> list[str]:
    """Run attempts one after another, and return the numbers of their processes."""
    found = []
    for number in range(first, last + 1):
        worker.store.queue(make_attempt(number, "run"))
        report = await worker.report(number)
        assert isinstance(report.result, Success), report
        found.append(report.xcoms[0][1])
    return found


def find_templates(worker: RunningWorker) -> list[int]:
    return [pid for pid in worker.zygote.processes if pid not in worker.worker.processes.pids]


async def use_template(worker: RunningWorker, first: int = 1) -> int:
    """Run attempts until they run in processes of a template, and return its number."""
    number = first
    while True:
        (pid,) = await run(worker, number, number)
        if pid not in list_imports(worker):
            (template,) = (pid for pid in find_templates(worker) if str(pid) in list_imports(worker))
            return template
        number += 1
        assert number < first + 100, "no process of a template runs an attempt"


async def test_processes_after_the_first_need_not_import_the_file(start_worker: StartWorker) -> None:
    worker = await start_worker(LIMITS)
    write(worker)
    await use_template(worker)
    imports = list_imports(worker)
    pids = await run(worker, 201, 240)

    assert len(set(pids)) >= 8
    assert list_imports(worker) == imports


@pytest.mark.parametrize(
    "line",
    [
        "import threading; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        "KEPT = open(__file__)",
        "import socket; KEPT = socket.socketpair()",
        "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
        "import subprocess; KEPT = subprocess.Popen(['sleep', '3600'])",
        "os.close(2)",
    ],
)
async def test_a_file_that_keeps_what_forks_cannot_share_is_imported_by_each_process(
    start_worker: StartWorker, line: str
) -> None:
    worker = await start_worker(WorkerLimits(concurrency=1, recycle_after=2, grace_seconds=0.5))
    # A process that runs itself would end the attempt that finds it.
    write(worker, line if "Popen" not in line else f"if os.getppid() == {worker.zygote.pid}: {line}; KEPT.kill()")
    pids = await run(worker, 1, 12)

    imports = list_imports(worker)
    assert set(pids) <= set(imports)
    # It was tried once.
    assert len(imports) - len(set(pids)) <= 3
    await until(lambda: not find_templates(worker))


async def test_a_file_that_changed_gets_another_template_and_the_old_one_ends_after_its_processes(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(LIMITS)
    gate = worker.folder / "gate"
    write(worker, body=f"while Path({str(gate)!r}).exists(): time.sleep(0.01)")
    old = await use_template(worker)
    gate.touch()
    worker.store.queue(make_attempt(501, "run"))
    await until(lambda: worker.worker.processes.running == 1)
    (worker.folder / "helper.py").write_text("VALUE = 7")
    write(worker, "import helper", "return helper.VALUE")
    gate.unlink()

    await worker.report(501)
    assert await run(worker, 601, 620) == ["7"] * 20
    await until(lambda: not is_running(old))
    await until(lambda: find_templates(worker))
    (worker.folder / "helper.py").write_text("VALUE = 88")
    assert await run(worker, 701, 720) == ["88"] * 20


async def test_the_first_process_of_a_file_is_forked_from_its_template_too(start_worker: StartWorker) -> None:
    worker = await start_worker(replace(LIMITS, concurrency=4))
    write(worker)
    worker.store.queue(*(make_attempt(number, "run") for number in range(1, 5)))
    pids = [(await worker.report(number)).xcoms[0][1] for number in range(1, 5)]
    (template,) = list_imports(worker)
    assert template not in pids
    assert len(set(pids)) == 4


async def test_a_template_is_left_when_a_file_that_was_opened_meanwhile_changes_or_comes(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(LIMITS)
    conf = worker.folder / "conf"
    conf.mkdir()
    (conf / "a.txt").write_text("1")
    write(
        worker,
        "FOUND = ' '.join(path.read_text() for path in sorted(Path('CONF').glob('*.txt')))".replace("CONF", str(conf)),
        "return FOUND",
    )
    assert await run(worker, 1, 3) == ['"1"'] * 3
    (conf / "a.txt").write_text("22")
    assert await run(worker, 11, 13) == ['"22"'] * 3
    (conf / "b.txt").write_text("3")
    assert await run(worker, 21, 23) == ['"22 3"'] * 3


async def test_a_template_is_left_after_a_while_since_what_the_file_asks_elsewhere_may_have_changed(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(LIMITS, reparse_seconds=0.3)
    write(worker)
    await run(worker, 1, 1)
    first = list_imports(worker)
    number = 100
    while len(list_imports(worker)) < len(first) + 2:
        assert not set(await run(worker, number, number)) & set(list_imports(worker))
        number += 1
        assert number < 5000
    await until(lambda: not is_running(int(first[0])))


async def test_a_file_that_could_not_be_imported_gets_a_template_once_it_can(start_worker: StartWorker) -> None:
    worker = await start_worker(LIMITS, reparse_seconds=0.2)
    conf = worker.folder / "conf.json"
    conf.write_text("{")
    write(worker, f"import json; json.loads(Path({str(conf)!r}).read_text())")
    worker.store.queue(make_attempt(1, "run"))
    assert "cannot be imported: JSONDecodeError" in await worker.error(1)
    assert "json.loads" in worker.store.text_of(1)
    conf.write_text("{}")
    await use_template(worker, 101)


async def test_what_a_killed_template_has_forked_is_given_back_and_the_file_gets_another_one(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(LIMITS)
    gate = worker.folder / "gate"
    write(worker, body=f"while Path({str(gate)!r}).exists(): time.sleep(0.01)")
    template = await use_template(worker)
    gate.touch()
    worker.store.queue(make_attempt(501, "run"))
    await until(lambda: worker.worker.processes.running == 1)
    pids = worker.worker.processes.pids
    os.kill(template, signal.SIGKILL)

    assert isinstance((await worker.report(501)).result, Loss)
    await until(lambda: not any(map(is_running, pids)))
    gate.unlink()
    assert await use_template(worker, 601) != template


async def test_a_template_that_a_task_has_stopped_is_killed_and_its_attempts_are_given_back(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker(LIMITS)
    gate = worker.folder / "gate"
    write(worker, body=f"while Path({str(gate)!r}).exists(): time.sleep(0.01)")
    template = await use_template(worker)
    gate.touch()
    worker.store.queue(make_attempt(501, "run", deadline_us=time.time_ns() // 1000 + 2_000_000))
    await until(lambda: worker.worker.processes.running == 1)
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.3)
    os.kill(template, signal.SIGSTOP)

    assert isinstance((await worker.report(501)).result, Failure)
    await until(lambda: not is_running(template))
    monkeypatch.undo()
    gate.unlink()
    assert await use_template(worker, 601) != template


async def test_a_template_whose_import_hangs_is_killed_and_holds_up_nothing(start_worker: StartWorker) -> None:
    worker = await start_worker(replace(LIMITS, import_seconds=4.0))
    # Only a template has no socket of a log.
    write(worker, "if os.path.realpath('/proc/self/fd/1') == '/dev/null': time.sleep(3600)")
    pids = await run(worker, 1, 20)

    assert set(pids) <= set(list_imports(worker))
    await until(lambda: len(list_imports(worker)) > len(set(pids)))
    await until(lambda: not find_templates(worker))
    pids += await run(worker, 101, 120)
    # It is not tried again.
    assert not find_templates(worker)
    assert len(set(list_imports(worker)) - set(pids)) <= 2  # it, and a process that has run nothing yet


async def test_a_template_that_is_not_needed_ends(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "IDLE_SECONDS", 0.2)
    worker = await start_worker(WorkerLimits(concurrency=1, recycle_after=5, grace_seconds=0.5, idle_seconds=0.2))
    write(worker)
    template = await use_template(worker)
    await until(lambda: not is_running(template))
    assert len(await run(worker, 501, 520)) == 20


async def test_no_more_than_a_few_files_have_templates(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", 1)
    worker = await start_worker(WorkerLimits(concurrency=1, recycle_after=2, grace_seconds=0.5, idle_seconds=0.2))
    write(worker)
    first = await use_template(worker)
    worker.write(FILE.replace("FIRST_LINES", "").replace("BODY", "pass"), "other.py")
    for number in range(501, 521):
        worker.store.queue(make_attempt(number, "run", file="other.py"))
        await worker.report(number)
    await until(lambda: not is_running(first))
