"""Why a task does not run, as its run, its page and the REST API say, and the services and files behind it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from tests.store.dags import dag, task
from tests.web.dags.played import PlayedStore, played_store
from tests.web.dags.test_dag_pages import log_in

from tidemill.core.tasks.endings import Deferral
from tidemill.store.calls.service_calls import BeginSession, EndSession, ReportFiles, StoreFile
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.trigger_calls import ClaimTriggers


async def read_waits(store: PlayedStore, dag_id: str) -> dict[str, Any]:
    """Return why the tasks of a run wait, by task."""
    async with log_in(store) as client:
        rows = (await client.get(f"/api/v1/dags/{dag_id}/runs/r/tasks")).json()["rows"]
    return {row["task_id"]: row["waits_for"] for row in rows}


def begin_worker(store: PlayedStore, capacity: int = 8) -> int:
    """Replace the worker of a store by one with queues and a capacity."""
    store.call(EndSession(store.player.worker))
    store.player.worker = store.call(BeginSession("worker", "w1", "alpha", "boot", 5, ("default",), capacity))
    return store.player.worker


async def test_a_scheduled_task_names_the_tasks_that_have_its_slots_and_the_one_before_it(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        store.call(SetPool("narrow", 3))
        store.wait(store.player.create(dag(task("a", pool="narrow", pool_slots=2), id="holds"), run_id="r"))
        store.wait(store.player.schedule())
        more = (task("b", pool="narrow", pool_slots=2, priority=9), task("c", pool="narrow"), task("d", pool="none"))
        wide = task("e", pool="narrow", pool_slots=9)
        store.wait(store.player.create(dag(*more, wide, id="wants"), run_id="r"))
        store.wait(store.player.schedule())
        waits = await read_waits(store, "wants")
        async with log_in(store) as client:
            page = html.unescape((await client.get("/dags/wants/runs/r/tasks/b")).text)

    text = "2 slots of pool narrow, where 2 of 3 are in use by holds r a (2)"
    assert (waits["b"]["kind"], waits["b"]["text"]) == ("slots", text)
    assert text in page
    assert waits["c"]["text"] == "1 slot of pool narrow, after wants r b, which comes first and needs 2"
    assert waits["d"]["text"] == "pool none, which does not exist; create it"
    assert "which has only 3" in waits["e"]["text"]


async def test_a_scheduled_task_names_the_limits_that_it_has_reached(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        structure = dag(task("a"), task("b"), task("c", max_active_per_dag=1), id="limited", max_active_tasks=2)
        store.wait(store.player.create(structure, run_id="r"))
        store.wait(store.player.schedule())
        waits = await read_waits(store, "limited")

    assert waits["c"]["kind"] == "limit"
    assert waits["c"]["names"] == ["max_active_tasks"]
    assert "2 of 2 tasks of the DAG are active (max_active_tasks)" in waits["c"]["text"]


async def test_a_queued_task_names_its_full_workers_or_the_file_that_they_lack(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        worker = begin_worker(store, capacity=1)
        store.wait(store.player.create(dag(task("a"), task("b"), task("g", queue="gpu"), id="queued"), run_id="r"))
        store.wait(store.player.schedule())
        free = await read_waits(store, "queued")
        (attempt,) = store.wait(store.player.turn(capacity=1)).claimed
        other = "b" if attempt.task_id == "a" else "a"
        full = (await read_waits(store, "queued"))[other]
        store.call(ReportFiles(worker, ("queued.py",)))
        lacked = (await read_waits(store, "queued"))[other]

    assert free["a"]["text"] == "a free worker of queue default"
    assert free["g"]["missing"] == "no live worker takes tasks from queue 'gpu'; add it to worker.queues"
    assert full["text"] == "a free worker of queue default; 1 live worker with 1 place, none free"
    assert (lacked["kind"], lacked["names"]) == ("file", ["queued.py"])
    assert "no live one has had it since" in lacked["text"]
    assert "dags.missing_file_seconds" in lacked["missing"]


async def test_a_queued_run_and_a_deferred_task_say_for_what_where_and_until_when_they_wait(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        triggerer = store.call(BeginSession("triggerer", "t", "beta", "boot", 9, (), 10))
        store.defer("defers", "my.Poll", {"url": "https://host"})
        before = (await read_waits(store, "defers"))["only"]
        store.call(ClaimTriggers(triggerer, 1, 10))
        after = (await read_waits(store, "defers"))["only"]
        store.wait(store.player.create(dag(task("t"), id="one", max_active_runs=1), run_id="first"))
        store.wait(store.player.schedule())
        store.wait(store.player.create(dag(task("t"), id="one", max_active_runs=1), run_id="r"))
        run = (await read_waits(store, "one"))["t"]
        deferral = Deferral("my.Poll", "{}", "resume", queue="other")
        store.wait(store.player.create(dag(task("only"), id="queues"), run_id="r"))
        (attempt,) = [one for one in store.wait(store.player.claim()) if one.dag_id == "queues"]
        store.wait(store.player.report(attempt, deferral))
        store.call(EndSession(triggerer))
        # The process that supervises a triggerer has a session without queues and capacity.
        parent = store.call(BeginSession("triggerer", "t", "beta", "boot", 8))
        store.call(BeginSession("triggerer", "t", "beta", "boot", 9, ("gpu",), 10, parent))
        queues = (await read_waits(store, "queues"))["only"]

    assert before["where"] == "no triggerer yet"
    assert after["where"] == "the triggerer on beta, process 9"
    assert after["since"] <= after["times_out_at"] - 3_599
    assert run["text"] == "the run to start; 1 run of the DAG may be active (max_active_runs)"
    assert queues["missing"] == "no live triggerer takes triggers from queue 'other'; add it to triggerer.queues"


async def test_the_services_of_all_hosts_have_a_page_and_a_part_of_the_api(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        begin_worker(store)
        async with log_in(store) as client:
            listed = (await client.get("/api/v1/services")).json()
            page = (await client.get("/services")).text

    assert [one["kind"] for one in listed] == ["scheduler", "worker"]
    worker = listed[1]
    assert (worker["name"], worker["host"], worker["pid"], worker["queues"]) == ("w1", "alpha", 5, ["default"])
    assert (worker["capacity"], worker["holds"], worker["is_silent"]) == (8, 0, False)
    assert 0 <= worker["beat_age_seconds"] < 30
    for text in ("w1", "alpha", "0 of 8", "<code>default</code>"):
        assert text in page


async def test_files_that_differ_between_hosts_are_shown(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        worker = begin_worker(store)
        store.call(StoreFile("etl.py", "digest"))
        store.call(StoreFile("sales.py", "digest"))
        store.call(ReportFiles(worker, ("etl.py",), ("sales.py",)))
        async with log_in(store) as client:
            listed = (await client.get("/api/v1/dag-file-differences")).json()
            page = (await client.get("/dags")).text

    found = [(one["path"], one["difference"], one["host"], one["session"]) for one in listed]
    assert found == [("etl.py", "missing", "alpha", worker), ("sales.py", "differs", "alpha", worker)]
    assert "etl.py differs between hosts" in page
    assert "alpha: another content" in page
