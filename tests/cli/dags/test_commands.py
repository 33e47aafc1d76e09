"""Commands over a store that no process has open."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import signal
import sys
import zlib
from pathlib import Path

import pytest
from tests import prepared
from tests.cli.dags.conftest import DevSite
from tests.store.dags import Player, add_elements, dag, task
from tests.until import wait_until

from tidemill.cli.dags.dags import parse_conf
from tidemill.core.errors import ConfigError
from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.core.tasks.structure import MapSource, MapStructure
from tidemill.runtime.log.task_lines import encode_line
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.store.calls.service_calls import BeginSession, EndSession, ListSessions, ReportFiles
from tidemill.store.calls.stream_calls import EndStream, KeepBatch
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import CallbackReport, LogPart
from tidemill.store.engines.sqlite import open_sqlite


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> DevSite:
    """A folder of DAGs with a store that has nothing in it yet, for tests that leave it so."""
    site = DevSite(tmp_path_factory.mktemp("empty"))
    assert site.run("db", "migrate").returncode == 0
    return site


@pytest.fixture
def store(dev: DevSite, empty: DevSite) -> DevSite:
    for path in empty.folder.glob("dags.db*"):
        shutil.copy(path, dev.folder)
    return dev


def test_without_a_store_a_command_says_how_to_get_one(dev):
    done = dev.run("dags", "list")

    assert done.returncode == ExitCode.CONFIG
    assert "there is no store" in done.stderr
    assert "tidemill dev" in done.stderr


def test_a_dag_is_tested_without_a_store_and_its_variables_have_their_defaults(dev):
    (dev.folder / "dags" / "defaults.py").write_text(
        "from tidemill.dags import DAG, Variable, task\n"
        "with DAG('defaults'):\n"
        "    @task\n"
        "    def read(text):\n"
        "        print(text, Variable.get('a', default='inner'))\n"
        "    read(\"{{ var.value.get('b', 'outer') }}\")\n"
    )
    done = dev.run("dags", "test", "defaults")
    assert done.returncode == 0, done.stderr
    assert "outer inner" in done.stdout


def test_a_store_whose_files_nobody_has_read_says_so(empty):
    assert (
        empty.run("dags", "list").stdout == "no DAGs: no file has been parsed yet; run `tidemill dev` to parse them\n"
    )
    assert (
        empty.run("dags", "errors").stdout
        == "no errors: no file has been parsed yet; run `tidemill dev` to parse them\n"
    )
    assert empty.rows("dags", "list") == []


def test_pools_variables_and_connections_are_set_listed_and_deleted(store):
    assert store.run("pools", "set", "few", "2", "--description", "for a slow database").returncode == 0
    assert [(row["pool"], row["slots"]) for row in store.rows("pools", "list")] == [("default_pool", 128), ("few", 2)]
    assert store.run("pools", "delete", "few").returncode == 0
    assert store.run("pools", "delete", "few").returncode == ExitCode.CONFIG

    assert store.run("variables", "set", "city", "Köln").returncode == 0
    assert "value" not in store.rows("variables", "list")[0]
    assert store.rows("variables", "list", "--values")[0]["value"] == "Köln"
    assert store.run("variables", "delete", "city").returncode == 0

    done = store.run("connections", "set", "db", "--type", "postgres", "--password", "hunter2", "--port", "5432")
    assert done.returncode == 0, done.stderr
    done = store.run("connections", "list", "--json")
    assert json.loads(done.stdout)["port"] == 5432
    assert "hunter2" not in done.stdout
    for path in store.folder.glob("dags.db*"):
        assert b"hunter2" not in path.read_bytes()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("dags", "show", "nope"), "there is no DAG 'nope'"),
        (("runs", "show", "nope"), "there is no DAG 'nope'"),
        (("dags", "trigger", "nope"), "nope"),
        (("dags", "pause", "nope"), "nope"),
        (("dags", "trigger", "nope", "--conf", "[1]"), "must be a JSON object"),
        (("dags", "trigger", "nope", "--conf", "{"), "is not JSON"),
        (("dags", "trigger", "nope", "--conf", "@nope.json"), "--conf @nope.json cannot be read: No such file"),
        (("dags", "trigger", "nope", "--conf", "@."), "--conf @. cannot be read: Is a directory"),
        (
            ("dags", "trigger", "nope", "--conf", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
            "--conf is nested too deep",
        ),
        (("dags", "trigger", "nope", "--logical-date", "tomorrow"), "not a time"),
        (("dags", "trigger", "nope", "--logical-date", "9999-12-31T23:00:00-12:00"), "not a time"),
        (("dags", "trigger", "nope", "--conf", '{"rows": NaN}'), "--conf['rows'] is nan"),
        (("dags", "trigger", "nope", "--run", "a\udcff"), "the argument with 'a\\udcff' is not UTF-8"),
        (("variables", "set", "a", "\udcff"), "'\\udcff' is not UTF-8"),
        (("runs", "list", "--state", "done"), "use queued, running, success, failed"),
        (("tasks", "mark", "nope", "a", "--as", "done"), "success, failed or skipped"),
        (("connections", "set", "a", "--type", "http", "--extra", "1"), "must be a JSON object"),
        (("connections", "set", "a", "--type", "http", "--extra", "[" * 50_000), "must be a JSON object"),
        (("variables", "set", "", "x"), "a variable needs a name"),
        (("connections", "set", "", "--type", "http"), "a connection needs a name"),
        (("variables", "delete", "nope"), "there is no variable 'nope'"),
        (("dags", "test", "nope"), "no file in"),
        (("dags", "test", "story", "--conf", '{"rows": "many"}'), "param 'rows': 'many' is not of type 'integer'"),
    ],
)
def test_a_mistake_is_named_in_one_line(empty, words, advice):
    done = empty.run(*words)

    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert advice in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_configuration_of_a_run_is_read_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO('{"naïve": 1}\n'.encode())))
    assert parse_conf("-") == {"naïve": 1}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a": "\xff"}')))
    with pytest.raises(ConfigError, match="--conf - is not UTF-8: invalid start byte at byte 7"):
        parse_conf("-")


@pytest.mark.parametrize(
    ("words", "most"),
    [(("pools", "set", "a"), "2147483647"), (("runs", "list", "--limit"), "100000")],
)
def test_a_number_that_no_store_holds_is_refused(dev, words, most):
    done = dev.run(*words, "99999999999999999999")

    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert f"Input should be less than or equal to {most}" in done.stderr


TESTED = """
import time
from datetime import timedelta
from tidemill.dags import DAG, BashOperator, FileSensor, task

with DAG("pooled"):
    @task(pool="database", pool_slots=200)
    def reads():
        return 1
    @task(pool_slots=200)
    def writes(rows):
        return rows
    writes(reads())

with DAG("maps"):
    @task
    def number(value):
        return None if value == 1 else value
    @task
    def shows(value):
        print(f"got {value}")
    shows.expand(value=number.expand(value=[0, 1, 2]))

with DAG("late"):
    FileSensor(task_id="arrived", filepath="nothing.csv", poke_interval=0.1, timeout=0.3)

with DAG("sleeps"):
    BashOperator(task_id="sleeps", bash_command="echo $$ > $SHELL_TXT; sleep 3600; true")
"""


def test_a_test_of_a_dag_needs_no_pools_and_tells_why_it_failed(store):
    (store.folder / "dags" / "tested.py").write_text(TESTED)
    done = store.run("dags", "test", "pooled")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "pooled: success")

    done = store.run("dags", "test", "maps")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "maps: success")
    assert sorted(re.findall("got .", done.stdout)) == ["got 0", "got 2"]

    done = store.run("dags", "test", "late")
    assert done.returncode == ExitCode.REMOTE
    assert done.stdout.splitlines()[-2].startswith("--- arrived: failed: SensorTimeout: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_test_of_a_dag_that_is_told_to_end_ends_what_it_has_started(store, number):
    (store.folder / "dags" / "tested.py").write_text(TESTED)
    shell = store.folder / "shell.txt"
    test = prepared.start(["dags", "test", "sleeps"], cwd=store.folder, env={**store.env, "SHELL_TXT": str(shell)})
    pid = wait_until(lambda: shell.exists() and shell.read_text().strip())
    test.send_signal(number)
    assert test.wait(60) == ExitCode.STOPPED
    assert not Path(f"/proc/{pid}").exists()


def test_a_dag_runs_in_one_process_with_variables_of_the_store(store):
    store.run("variables", "set", "seconds", "0")

    done = store.run("dags", "test", "story")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "story: success")
    assert store.run("dags", "test", "fails").returncode == ExitCode.REMOTE
    assert store.run("dags", "test", "long").returncode == 0
    assert store.rows("runs", "list") == []


def test_a_run_that_no_service_works_on_says_so_instead_of_pools(store):
    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        await player.create(dag(task("only"), id="small"), run_id="r")
        for service in await database.call(ListSessions()):
            await database.call(EndSession(service.id))
        await database.close()

    asyncio.run(play())
    wanted = "warning: the run waits: no scheduler and no worker is alive; start `tidemill dev`"
    done = store.run("runs", "show", "small", "r")
    assert done.stderr.strip() == wanted
    assert "no scheduler is alive" in done.stdout
    assert "pool default_pool, or" not in done.stdout
    assert store.run("dags", "trigger", "small", "--run", "other").stderr.strip() == wanted


def test_the_elements_of_a_map_are_counted_listed_cleared_and_marked_by_range(store):
    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        over = MapStructure(("x",), (MapSource("literal", length=6),))
        await player.create(dag(task("m", mapped=over), task("z", "m"), id="maps"), run_id="r")
        await player.play(lambda one: Failure("no", may_retry=False) if one.map_index in (1, 3) else Success())
        await database.close()

    asyncio.run(play())
    (shown,) = store.rows("runs", "show", "maps")
    assert [(one["task"], one["state"]) for one in shown["tasks"]] == [("m", "failed"), ("z", "upstream_failed")]
    counts = shown["tasks"][0]["elements"]
    assert (counts["arrived"], counts["closed"], counts["success"], counts["failed"]) == (6, True, 4, 2)
    assert "6 of 6: 4 success, 2 failed" in store.run("runs", "show", "maps").stdout
    assert "6 of 6: 4 success, 2 failed" in store.run("tasks", "states", "maps").stdout
    failed = store.rows("tasks", "elements", "maps", "m", "--state", "failed")
    assert [(row["map_index"], row["error"]) for row in failed] == [(1, "no"), (3, "no")]
    listed = store.rows("tasks", "elements", "maps", "m", "--run", "r", "--index", "2-4")
    assert [row["map_index"] for row in listed] == [2, 3, 4]
    assert store.run("tasks", "elements", "maps", "m", "--state", "removed").stdout == "no such elements\n"
    for wrong in ("x", "4-2", "99999999999"):
        assert store.run("tasks", "clear", "maps", "m", "--index", wrong).returncode == ExitCode.CONFIG

    dry = store.rows("tasks", "clear", "maps", "m", "--index", "0-2", "--dry-run")
    assert dry == [{"tasks": ["m[0]", "m[1]", "m[2]"]}]
    marked = store.rows("tasks", "mark", "maps", "m", "--index", "0-1", "--as", "skipped")
    assert marked == [{"tasks": ["m[0]", "m[1]"]}]
    assert store.rows("tasks", "retry-failed", "maps", "m") == [{"tasks": ["m[3]", "z"]}]
    (shown,) = store.rows("runs", "show", "maps")
    assert shown["tasks"][0]["state"] == "mapped"
    assert "its elements:" in shown["tasks"][0]["waits_for"]


def test_a_long_list_of_a_configuration_is_stored_value_by_value(store):
    over = MapStructure(("x",), (MapSource("param", key="rows"),))

    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        await player.create(dag(task("m", mapped=over), id="long"), run_id="first", conf='{"rows":[1]}')
        await database.close()

    asyncio.run(play())
    rows = [{"n": number, "text": "x" * 1_000} for number in range(2_000)]
    (store.folder / "conf.json").write_text(json.dumps({"day": "today", "rows": rows}))
    assert store.run("dags", "trigger", "long", "--run", "r", "--conf", "@conf.json").returncode == 0
    (shown,) = store.rows("runs", "show", "long", "r")
    assert shown["conf"] == {"rows": {"$tidemill": "items", "value": 2_000}, "day": "today"}

    async def claim() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        last = [one for one in await player.claim() if one.run_id == "r"][-1]
        assert json.loads(str(last.elements[0])) == rows[last.map_index]
        assert len(last.conf) < 1_000
        await database.close()

    asyncio.run(claim())


def test_files_that_differ_between_hosts_and_what_tasks_wait_for_are_shown(store):
    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        await player.create(dag(task("a", queue="gpu"), id="waits"), run_id="r")
        await player.schedule()
        worker = await database.call(BeginSession("worker", "w1", "alpha", "boot", 1, ("gpu",), 2))
        await database.call(ReportFiles(worker, ("waits.py",)))
        await database.close()

    asyncio.run(play())
    (row,) = store.rows("tasks", "states", "waits")
    assert row["waits_for"].startswith("a worker of queue gpu that has the file waits.py")
    assert store.rows("tasks", "states", "waits", "--state", "success") == []
    shown = store.run("dags", "errors").stdout
    assert "waits.py: the worker w1 on alpha has lacked it for" in shown
    (difference,) = store.rows("dags", "errors")
    assert (difference["file"], difference["difference"], difference["host"]) == ("waits.py", "missing", "alpha")
    assert "1 file differs between hosts: tidemill dags errors" in store.run("dags", "list").stderr


def test_a_stream_and_its_events_are_shown(store):
    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        triggerer = await player.begin_service("triggerer")
        await player.create(dag(task("a"), task("b", "a"), id="streams"), run_id="r")
        await player.report(await player.claim_one(), Deferral("my.Pages", "{}", "", streams=True))
        (claimed,) = await database.call(ClaimTriggers(triggerer, 1, 10))
        events = tuple(FiredEvent(claimed.id, claimed.token, text, None, 1) for text in ('"x"', '"y"'))
        await database.call(StoreEvents(triggerer, 2, events))
        attempt = await player.claim_one()
        await database.call(KeepBatch(attempt.task, attempt.epoch, claimed.id, 1, 1, checkpoint="7"))
        await database.call(EndStream(triggerer, claimed.id, claimed.token))
        await database.close()

    asyncio.run(play())
    streams = [row["stream"] for row in store.rows("tasks", "states", "streams")]
    assert streams[1] is None
    counts = [streams[0][name] for name in ("received", "handled", "undelivered", "cursor", "ended", "error")]
    assert counts == [2, 1, 1, "7", True, None]
    shown = store.run("tasks", "states", "streams").stdout
    assert "2 received, 1 handled, 1 undelivered" in " ".join(shown.split())
    events = store.rows("tasks", "events", "streams", "a")
    assert [(one["sequence_index"], one["payload"], one["is_last"]) for one in events] == [
        (1, '"y"', True),
        (0, '"x"', False),
    ]
    assert len({one["trigger_run_id"] for one in events}) == 1
    assert '"y"' in store.run("tasks", "events", "streams", "a").stdout
    assert store.run("tasks", "events", "streams", "b").stdout == "no events\n"


def test_commands_name_an_element_of_a_mapped_task_by_its_index(store):
    async def play() -> None:
        database = await open_sqlite(store.folder / "dags.db")
        player = await Player(database).begin()
        run = await player.create(
            dag(task("a", callbacks=("on_success",)), task("b", "a"), task("c", "b"), id="maps"), run_id="r"
        )
        await add_elements(database, run, "a", "scheduled", "scheduled")
        await add_elements(database, run, "b", "success")
        for one in await player.claim():
            text = f"log of {one.map_index}"
            data = zlib.compress(encode_line(0, "info", "stdout", text))
            await database.call(AppendLog((LogPart(one.task, 1, 0, 0, data, 1),)))
            await player.report(one, Success(), xcoms=(("return_value", json.dumps(text)),))
        for one in await player.claim():
            if one.callback is not None:
                await player.turn(callbacks=(CallbackReport(one.callback.id, "no"),))
        await database.close()

    asyncio.run(play())
    assert [row["map_index"] for row in store.rows("tasks", "states", "maps")] == [-1, -1, -1]
    assert [row["map_index"] for row in store.rows("tasks", "elements", "maps", "a")] == [0, 1]
    assert [row["text"] for row in store.rows("tasks", "logs", "maps", "a", "--index", "1")] == ["log of 1"]
    of_both = store.rows("tasks", "logs", "maps", "a", "--index", "0-9")
    assert [(row["map_index"], row["text"]) for row in of_both] == [(0, "log of 0"), (1, "log of 1")]
    for wrong in (["--index", "5-9"], ["--index", "0-1", "--follow"]):
        assert store.run("tasks", "logs", "maps", "a", *wrong).returncode == ExitCode.CONFIG
    assert [row["map_index"] for row in store.rows("tasks", "xcoms", "maps", "a", "--index", "0-1")] == [0, 1]
    assert [row["text"] for row in store.rows("tasks", "logs", "maps", "a", "--follow")] == ["log of -1"]
    assert [row["value"] for row in store.rows("tasks", "xcoms", "maps", "a", "--index", "0")] == ["log of 0"]
    assert len(store.rows("tasks", "xcoms", "maps")) == 3
    assert "a[0]" in store.run("tasks", "xcoms", "maps").stdout
    assert [row["to"] for row in store.rows("tasks", "history", "maps", "a", "--index", "1")][-1] == "success"
    (shown,) = store.rows("runs", "show", "maps")
    waits = {one["task"]: one["waits_for"] for one in shown["tasks"]}
    assert (waits["c"], waits["a"]) == ("upstream b", None), "an ended element is not the end of its task"
    called = store.run("runs", "callbacks", "maps").stdout
    assert "tidemill tasks logs maps a --run r --index 1 --try 0" in called
    assert "tidemill tasks logs maps a --run r --try 0" in called

    assert store.rows("tasks", "clear", "maps", "a", "--index", "1", "--dry-run") == [{"tasks": ["a[1]"]}]
    assert store.rows("tasks", "mark", "maps", "a", "--index", "1", "--as", "failed") == [{"tasks": ["a[1]"]}]
    assert [row["state"] for row in store.rows("tasks", "elements", "maps", "a")] == ["success", "failed"]
    assert store.rows("tasks", "states", "maps")[0]["state"] == "success"
    missing = store.run("tasks", "logs", "maps", "a", "--index", "2")
    assert (missing.returncode, "a[2]" in missing.stderr) == (ExitCode.CONFIG, True)
