from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import signal
import struct
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.dags.conftest import DevSite
from tests.size import sized
from tests.spark.terminal import Command, running
from tests.until import slack, wait_until

from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.table import find_descendants, find_marked, is_running, read_command

#: Signals at a start are sent this late at most, and then when it is over.
LATEST_SECONDS = 4.5


def find_process(root: int, text: str) -> int:
    found = [pid for pid in find_descendants(root) if text in read_command(pid)]
    assert len(found) == 1, [read_command(pid) for pid in find_descendants(root)]
    return found[0]


def test_a_run_with_a_retry_and_a_deferral_succeeds_and_everything_about_it_can_be_read(dev):
    process = dev.start()

    assert {row["dag"] for row in dev.rows("dags", "list")} == {"story", "fails", "long"}
    run = dev.rows("dags", "trigger", "story", "--conf", '{"rows": 7}', "--wait")[0]
    assert run["state"] == "success"
    assert dev.states("story") == {"first": "success", "second": "success", "waits": "success"}
    done = dev.run("dags", "trigger", "story", "--conf", '{"rows": 0}')
    assert (done.returncode, done.stderr.count("\n")) == (ExitCode.CONFIG, 1)
    assert "param 'rows': 0 is less than the minimum of 1" in done.stderr
    assert "how many rows" in dev.run("dags", "show", "story").stdout
    assert [row["text"] for row in dev.rows("tasks", "logs", "story", "first")] == ["the first task"]
    assert "ValueError: not at once" in dev.run("tasks", "logs", "story", "second", "--try", "1").stdout
    changes = [row["to"] for row in dev.rows("tasks", "history", "story", "waits")]
    assert changes == ["scheduled", "queued", "running", "deferred", "scheduled", "queued", "running", "success"]
    xcoms = {row["task"]: row["value"] for row in dev.rows("tasks", "xcoms", "story")}
    assert xcoms == {"first": 7, "second": 8, "waits": "resumed"}

    # As much as is documented, which no argument holds; and a name that is probably a mistake.
    text = json.dumps({"row": 3, "data": "a" * (1024 * 1024 - 22)})
    assert len(text) == 1024 * 1024
    (dev.folder / "conf.json").write_text(text)
    done = dev.run("dags", "trigger", "fails", "--conf", "@conf.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["conf"] == json.loads(text)
    (dev.folder / "conf.json").write_text(f'{{"more": 1, {text[1:]}')
    assert "may have up to 1,048,576 bytes" in dev.run("dags", "trigger", "fails", "--conf", "@conf.json").stderr
    (dev.folder / "conf.json").write_text('{"row": 3, "other": 1}')
    done = dev.run("dags", "trigger", "story", "--run", "misspelt", "--conf", "@conf.json", "--wait")
    assert done.stderr == "warning: DAG 'story' has no param 'row'; did you mean 'rows'?\n"

    tree = find_descendants(process.pid)
    assert dev.stop() == ExitCode.OK
    assert dev.log.count("stopping; a second signal stops at once") == 1
    wait_until(lambda: not any(map(is_running, tree)), 60, what="the end of all processes")
    # Without `dev` the store is read by the command itself.
    assert dev.rows("runs", "list", "story")[0]["state"] == "success"


@pytest.mark.long  # tests/services has it of a worker and a triggerer
def test_a_killed_tree_leaves_nothing_and_the_next_start_continues_and_removes_old_runs(dev):
    process = dev.start()
    assert dev.rows("dags", "trigger", "story", "--run", "old", "--wait")[0]["state"] == "success"
    assert dev.rows("dags", "trigger", "story", "--run", "new", "--wait")[0]["state"] == "success"
    dev.run("dags", "trigger", "long")
    wait_until(lambda: dev.states("long") == {"sleeps": "running"}, what=lambda: dev.log)
    tree = find_descendants(process.pid)
    place = Path((dev.folder / "dags.db.lock").read_text().splitlines()[1]).parent
    assert place.is_dir()

    process.kill()
    process.wait()

    began = time.monotonic()
    wait_until(lambda: not any(map(is_running, tree)), 60, what=lambda: [read_command(pid) for pid in tree])
    assert time.monotonic() - began < slack(15)
    assert dev.run("variables", "set", "seconds", "0").returncode == ExitCode.OK
    dev.start(TIDEMILL_STORE__RETENTION_RUNS_DAYS="0.000001", TIDEMILL_STORE__RETENTION_RUNS_COUNT="1")
    assert not place.exists()
    wait_until(lambda: dev.rows("runs", "list", "long")[0]["state"] == "success", what=lambda: dev.log)
    wait_until(lambda: [row["run"] for row in dev.rows("runs", "list", "story")] == ["new"], what=lambda: dev.log)
    wait_until(lambda: "old runs of DAGs were removed" in dev.log, what=lambda: dev.log)


def test_a_folder_that_is_not_there_is_an_error_that_says_what_to_do(tidemill, tmp_path: Path):
    done = tidemill("dev", "nowhere")

    assert done.returncode == ExitCode.CONFIG
    assert "there is no folder nowhere" in done.stderr
    assert "tidemill init" in done.stderr


def test_on_a_terminal_a_table_below_the_log_shows_the_runs_and_nothing_of_it_is_left(dev):
    environ = {**dev.env, "TERM": "xterm", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    # The table is looked up the less often the longer a look takes: the task waits for it to be seen.
    _, go = dev.add_gated()
    command = Command(["dev"], environ, dev.folder, terminal=True)
    fcntl.ioctl(command._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        command.until_said("the worker is ready", 60)
        wait_until(lambda: dev.run("dags", "show", "gated").returncode == 0, what=lambda: command.said)
        dev.run("dags", "trigger", "gated", "--run", "today")
        wait_until(lambda: re.search(r"gated +today +running +0/1 +1 +0 +\d", command.said), what=lambda: command.said)
        go.touch()
        wait_until(lambda: re.search(r"gated +today +success +1/1 +\d+s", command.said), what=lambda: command.said)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == ExitCode.OK
        command._reader.join(60)
        assert b"today" not in command._said.rpartition(b"\r\x1b[K\x1b[C\x1b[J\r")[2], "the table is erased"
        drawn = [row for row in re.split(r"[\r\n]+", re.sub(r"\x1b\[\d*[A-Za-z]", "", command.said)) if "today" in row]
        assert max(map(len, drawn)) < 80
    finally:
        command.close()


# -- beside each other, in one `dev` ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevSite]:
    """A folder of DAGs with `tidemill dev` over it, which goes on."""
    made = DevSite(tmp_path_factory.mktemp("dev"))
    made.env |= {"TIDEMILL_METRICS__ENABLED": "true", "TIDEMILL_METRICS__PORT": "0"}
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.long  # tests/store has it of a store
def test_a_failed_run_can_be_cleared_marked_and_cancelled(site):
    done = site.run("dags", "trigger", "fails", "--wait")
    assert done.returncode == ExitCode.REMOTE
    assert site.states("fails") == {"fails": "failed", "after": "upstream_failed"}
    assert "RuntimeError: it is broken" in site.rows("tasks", "states", "fails", "--state", "failed")[0]["error"]
    assert site.rows("tasks", "clear", "fails", "--failed", "--dry-run") == [{"tasks": ["after", "fails"]}]
    (site.folder / "dags" / "example.py").write_text(
        (site.folder / "dags" / "example.py").read_text().replace('raise RuntimeError("it is broken")', "return 1")
    )
    site.run("tasks", "clear", "fails", "fails", "--downstream")
    wait_until(lambda: site.rows("runs", "list", "fails")[0]["state"] == "success", what=lambda: site.log)

    site.run("variables", "set", "seconds", "60")
    site.run("dags", "trigger", "long")
    wait_until(lambda: "sleeping" in site.run("tasks", "logs", "long", "sleeps").stdout, what=lambda: site.log)
    assert site.run("runs", "cancel", "long").returncode == 0
    wait_until(lambda: site.states("long") == {"sleeps": "failed"}, what=lambda: site.log)

    site.run("dags", "trigger", "long")
    wait_until(lambda: site.states("long") == {"sleeps": "running"}, what=lambda: site.log)
    assert site.rows("tasks", "mark", "long", "sleeps", "--as", "success") == [{"tasks": ["sleeps"]}]
    # Once its process has ended, which the worker says.
    wait_until(lambda: site.rows("runs", "list", "long")[0]["state"] == "success", what=lambda: site.log)
    history = site.rows("tasks", "history", "long", "sleeps")
    assert any("(command line)" in row["by"] for row in history)


def test_a_run_says_what_its_tasks_wait_for(site):
    site.run("pools", "set", "default_pool", "0")

    site.run("dags", "trigger", "story")

    wait_until(lambda: site.states("story")["first"] == "scheduled", what=lambda: site.log)
    waits = {task["task"]: task["waits_for"] for task in site.rows("runs", "show", "story")[0]["tasks"]}
    slot = "1 slot of pool default_pool, which has none; give it slots"
    assert waits == {"first": slot, "second": "upstream first", "waits": "upstream second"}
    assert slot in site.run("runs", "show", "story").stdout
    site.run("runs", "cancel", "story")
    assert {task["waits_for"] for task in site.rows("runs", "show", "story")[0]["tasks"]} == {None}
    site.run("pools", "set", "default_pool", "128")


@pytest.mark.long  # tests/services/supervision/test_child.py has it of a process
def test_a_process_of_the_tree_that_is_killed_comes_back_and_its_task_is_run_again(site):
    site.run("variables", "set", "seconds", "10")  # a command that looks takes seconds on a busy machine
    site.run("dags", "trigger", "long")
    wait_until(lambda: site.states("long") == {"sleeps": "running"}, what=lambda: site.log)

    os.kill(find_process(site.process.pid, "services.worker.process"), signal.SIGKILL)

    wait_until(lambda: site.rows("runs", "list", "long")[0]["state"] == "success", what=lambda: site.log)
    row = site.rows("tasks", "states", "long")[0]
    assert row["try"] == 1, "a lost attempt uses up no retry"
    assert "lost" in [row["input"].split()[0] for row in site.rows("tasks", "history", "long", "sleeps")]


def test_a_second_dev_over_the_same_store_is_refused_and_names_the_first(site):
    done = site.run("dev")

    assert done.returncode == ExitCode.CONFIG
    assert f"in use by process {site.process.pid}" in done.stderr


def test_a_file_that_breaks_is_named_and_its_dags_stay(site):
    path = site.folder / "dags" / "example.py"
    before = path.read_text()
    path.write_text("from tidemill.dags import DAG\nraise ValueError('half a file')\n")

    wait_until(lambda: site.rows("dags", "errors"), what=lambda: site.log)
    assert "ValueError: half a file" in site.rows("dags", "errors")[0]["error"]
    assert {row["dag"] for row in site.rows("dags", "list")} == {"story", "fails", "long"}
    path.write_text(before)
    wait_until(lambda: not site.rows("dags", "errors"), what=lambda: site.log)


def test_a_task_reads_of_the_run_before(site):
    (site.folder / "dags" / "past.py").write_text("""
from tidemill.dags import DAG, BashOperator, task

with DAG("past"):
    @task
    def count(prev_start_date_success=None, ti=None, run_id=None):
        before = ti.xcom_pull(include_prior_dates=True, default=0)
        earlier = ti.get_previous_dagrun("success")
        if earlier:
            assert earlier.start_date == prev_start_date_success
            assert ti.xcom_pull("count", run_id=earlier.run_id) == before
            assert ti.get_dagrun_state("past", earlier.run_id) == "success"
        return before + 1
    count() >> BashOperator(task_id="says", bash_command="echo since {{ prev_data_interval_start_success }}")
""")
    wait_until(lambda: site.run("dags", "show", "past").returncode == 0, what=lambda: site.log)

    for day in ("2026-01-01", "2026-01-02"):
        run = site.rows("dags", "trigger", "past", "--logical-date", day, "--wait")[0]
        assert run["state"] == "success", site.run("tasks", "logs", "past", "count").stdout

    xcoms = {row["task"]: row["value"] for row in site.rows("tasks", "xcoms", "past")}
    assert xcoms == {"count": 2, "says": "since 2026-01-01 00:00:00+00:00"}


def test_what_worker_and_triggerer_do_is_in_the_metrics_of_dev(site):
    address = wait_until(lambda: re.search(r"http://\S+/metrics", site.log), what=lambda: site.log)[0]
    (site.folder / "dags" / "patient.py").write_text("""
from datetime import timedelta
from tidemill.dags import DAG, TimeDeltaSensor
with DAG("patient"):
    TimeDeltaSensor(task_id="waits", delta=timedelta(hours=1))
""")
    wait_until(lambda: site.run("dags", "show", "patient").returncode == 0, what=lambda: site.log)
    site.run("dags", "trigger", "patient")
    site.run("variables", "set", "seconds", "60")
    site.run("dags", "trigger", "long")

    def read() -> dict[str, float]:
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    wanted = {'tidemill_worker_slots{state="busy"}': 1, 'tidemill_worker_slots{state="free"}': 7}
    wanted |= {"tidemill_task_triggers": 1, 'tidemill_tasks{state="deferred"}': 1, 'tidemill_tasks{state="running"}': 1}
    wait_until(lambda: read().items() >= wanted.items(), what=lambda: str(read()), pause_seconds=0.5)
    assert read()["tidemill_task_processes"] >= 1
    assert {
        'tidemill_service_lag_seconds{service="worker"}',
        'tidemill_service_lag_seconds{service="triggerer"}',
    } <= set(read())
    site.run("runs", "cancel", "long")


@pytest.mark.long
def test_a_dev_whose_store_is_removed_ends_its_tasks_and_saves_what_it_held(dev):
    began, _ = dev.add_gated()
    process = dev.start()
    dev.run("variables", "set", "kept", "42")
    wait_until(lambda: dev.run("dags", "trigger", "gated").returncode == 0, what=lambda: dev.log)
    wait_until(began.exists, what=lambda: dev.log)
    for file in dev.folder.glob("dags.db*"):
        file.unlink()

    assert process.wait(90) == ExitCode.REMOTE
    assert not find_marked(dev.mark)
    (saved,) = (file for file in dev.folder.glob("dags.db.recovered-*") if file.suffix != ".key")
    assert str(saved) in dev.log
    # As the message says.
    saved.rename(dev.folder / "dags.db")
    Path(f"{saved}.key").rename(dev.folder / "dags.db.key")
    assert {row["variable"] for row in dev.rows("variables", "list")} >= {"kept"}
    assert len(dev.rows("runs", "list", "gated")) == 1


@pytest.mark.long
def test_closing_its_terminal_ends_dev_in_order(dev):
    began, go = dev.add_gated()
    with running(["dev"], dev.env, dev.folder, terminal=True) as command:
        command.until_said("the worker is ready")
        wait_until(lambda: dev.run("dags", "trigger", "gated").returncode == 0, what=lambda: command.said)
        wait_until(began.exists, what=lambda: command.said)
        command.hang_up()
        # By a shell, too.
        command.process.send_signal(signal.SIGHUP)
        go.touch()
        assert command.process.wait(60) == ExitCode.OK
        command.until_alone()
    assert dev.rows("runs", "list", "gated")[0]["state"] == "success"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [["dev"], ["triggers", "run", "list.yaml"]], ids=lambda words: words[0])
def test_a_signal_at_each_moment_of_a_start_ends_it_well(dev, words):
    (dev.folder / "list.yaml").write_text(
        "- {name: waits, classpath: tidemill.triggers.builtin.temporal.TimeDeltaTrigger, kwargs: {delta: 3600}}"
    )
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if words[0] == "triggers":
        signals.remove(signal.SIGHUP)  # with which a trigger host reloads its list
    numbers = itertools.cycle(signals)
    ready = {"dev": "the worker is ready", "triggers": "the trigger host is starting"}[words[0]]
    seconds, is_ready = 0.0, False
    while not is_ready:
        number = next(numbers)
        with running(words, dev.env, dev.folder) as command:
            pid = command.process.pid
            wait_until(lambda pid=pid, number=number: handles(pid, number), what=lambda command=command: command.said)
            time.sleep(min(seconds, LATEST_SECONDS))
            if seconds > LATEST_SECONDS:  # a busy machine
                command.until_said(ready)
            is_ready = ready in command.said
            command.process.send_signal(number)
            assert command.process.wait(60) == ExitCode.OK, (number, seconds, command.said)
            command.until_alone()
        seconds += sized(0.9, 0.4)


def handles(pid: int, number: int) -> bool:
    """Tell whether a signal does not simply end a process: Python itself has started."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")]
    # Python has a handler of its own for Ctrl-C.
    return bool(caught & 1 << (signal.SIGTERM - 1) and caught & 1 << (number - 1))
