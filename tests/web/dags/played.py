"""DAGs in a real SQLite store, on a loop of its own thread, with tasks in many states."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, update
from tests.store.dags import Player, add_elements, add_map, dag, mapped, task
from tests.store.test_groups import group, part
from tests.web.scripted_pipeline import SCRIPT, SECRET

from tidemill.config.settings import Settings
from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.core.tasks.instance import format_instance
from tidemill.core.tasks.structure import (
    LoopStructure,
    MapSource,
    MapStructure,
    ParamStructure,
    ScheduleStructure,
    TaskStructure,
)
from tidemill.runtime.log.task_lines import encode_line
from tidemill.services.dev.web_ui import WatchedDags
from tidemill.store.calls.call import Call
from tidemill.store.calls.iteration_calls import KeepParts, KeptPart
from tidemill.store.calls.service_calls import BeginSession, ReportFiles, StoreFile
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.stream_calls import EndStream, KeepBatch
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import PART_BASE, AttemptReport, CallbackReport, ClaimedAttempt, LogPart
from tidemill.store.dag_tables import task_instance
from tidemill.store.engines.sqlite import SqliteDatabase, open_sqlite

T = TypeVar("T")
DAG = "orders"
RUN = "first run"


def _build_orders() -> Any:
    params = (
        ParamStructure("region", '"eu"', json.dumps({"enum": ["eu", "us"]}), f"Where {SCRIPT}"),
        ParamStructure("size", "3", json.dumps({"type": "integer", "minimum": 1})),
    )
    return dag(
        task("extract", retries=1, doc=SCRIPT),
        task("wait", "extract"),
        task("load", "extract", edge_labels={"report": SCRIPT}),
        task("notify", "wait", rule="all_done"),
        task("retried", retries=2),
        task("report", "load", "wait", "extract"),
        id=DAG,
        params=params,
        tags=("daily", SCRIPT),
        doc=SCRIPT,
        schedule=ScheduleStructure("cron", "0 3 * * *", start_us=1_700_000_000_000_000),
    )


class PlayedStore:
    """A store, and the web UI's view of it."""

    def __init__(self, folder: Path, **debug: Any) -> None:
        self.settings = Settings.model_validate(
            {"debug": {"enabled": True, "port": 0, **debug}, "store": {"url": f"postgresql://app:{SECRET}@db/orders"}}
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.database: SqliteDatabase = self.wait(open_sqlite(folder / "dags.db"))
        self.player = Player(self.database)
        self.wait(self.player.begin())
        self.watched = WatchedDags(self.settings, "worker-1", "dags", self.database, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def call(self, request: Call[T]) -> T:
        return self.wait(self.database.call(request))

    def fill(self) -> None:
        """Play a run until tasks are in many states."""
        self.wait(self._fill())

    async def _fill(self) -> None:
        player = self.player
        await self.database.call(StoreFile("broken.py", "x", error=f"Traceback\nSyntaxError: {SCRIPT}"))
        await player.create(dag(task("only"), id="small"))
        await player.play()
        await player.create(_build_orders(), run_id=RUN, conf=json.dumps({"note": SCRIPT}))
        for attempt in await player.claim():
            await self._log(attempt, f"hello {SCRIPT}", "\x1b[31mred")
            if attempt.task_id == "extract":
                await player.report(attempt, Success(), xcoms=(("return_value", json.dumps(SCRIPT)),))
            else:
                await player.report(attempt, Failure(f"Traceback\nValueError: {SCRIPT}"))
        for attempt in await player.claim():
            if attempt.task_id == "wait":
                await player.report(attempt, Deferral("module.Trigger", "{}", "resume"))

    def defer(self, dag_id: str, classpath: str, kwargs: dict[str, Any]) -> None:
        """Run a DAG of one task, `only`, which defers."""
        self.wait(self._defer(dag_id, Deferral(classpath, json.dumps(kwargs), "resume", timeout_us=3_600_000_000)))

    async def _defer(self, dag_id: str, deferral: Deferral) -> None:
        await self.player.create(dag(task("only"), id=dag_id), run_id="r")
        (attempt,) = [each for each in await self.player.claim() if each.dag_id == dag_id]
        await self.player.report(attempt, deferral)

    def stream(self, dag_id: str, *payloads: Any) -> int:
        """Run a DAG of one task, `only`, with a trigger that streams and has fired these events; return the trigger."""
        return self.wait(self._stream(dag_id, payloads))

    async def _stream(self, dag_id: str, payloads: Sequence[Any]) -> int:
        await self._defer(dag_id, Deferral("my.Pages", "{}", "", streams=True))
        session = await self.player.begin_service("triggerer")
        triggers = await self.database.call(ClaimTriggers(session, 1, 10))
        (claimed,) = [one for one in triggers if one.dag_id == dag_id]
        events = tuple(FiredEvent(claimed.id, claimed.token, json.dumps(one), None, 1) for one in payloads)
        await self.database.call(StoreEvents(session, 2, events))
        (attempt,) = [each for each in await self.player.claim() if each.dag_id == dag_id]
        kept = KeepBatch(attempt.task, attempt.epoch, claimed.id, 1, 1, checkpoint='"page 1"')
        await self.database.call(kept)
        await self.database.call(EndStream(session, claimed.id, claimed.token, "Traceback\nValueError: no page"))
        return claimed.id

    async def _log(self, attempt: ClaimedAttempt, *texts: str) -> None:
        data = b"".join(encode_line(1_700_000_000_000_000 + n, "info", "stdout", text) for n, text in enumerate(texts))
        part = LogPart(attempt.task, attempt.try_number, 0, 0, zlib.compress(data), len(texts))
        await self.database.call(AppendLog((part,)))

    def map_task(self, dag_id: str, *states: str) -> None:
        """Create a run of a DAG with the tasks `a` and `b`, where `a` has elements in these states."""
        self.wait(self._map_task(dag_id, states))

    async def _map_task(self, dag_id: str, states: Sequence[str]) -> None:
        run = await self.player.create(dag(task("a"), task("b", "a"), id=dag_id), run_id="r")
        await add_elements(self.database, run, "a", *states)
        for attempt in await self.player.claim():
            if attempt.dag_id == dag_id:
                name = format_instance(attempt.task_id, attempt.map_index)
                await self._log(attempt, f"log of {name}")
                await self.player.report(attempt, Success(), xcoms=(("return_value", json.dumps(f"value of {name}")),))

    def open_map(self, dag_id: str, states: Sequence[str], **counts: Any) -> None:
        """Create a run of a DAG whose mapped task `m` has elements in these states, and these counts."""
        self.wait(self._open_map(dag_id, states, counts))

    async def _open_map(self, dag_id: str, states: Sequence[str], counts: dict[str, Any]) -> None:
        structure = dag(task("a"), mapped("m", "a", retries=1), task("z", "m"), id=dag_id)
        run = await self.player.create(structure, run_id="r")
        for attempt in await self.player.claim():
            if attempt.dag_id == dag_id:
                await self.player.report(attempt, Success())
        await add_elements(self.database, run, "m", *states)
        await add_map(self.database, run, "m", **counts)
        errors = [
            (index, f"Traceback\nValueError: row {index % 2} {SCRIPT}")
            for index, state in enumerate(states)
            if state == "failed"
        ]

        def fail(connection: Connection) -> None:
            retried = and_(task_instance.c.run == run.id, task_instance.c.state == "up_for_retry")
            connection.execute(update(task_instance).where(retried).values(next_due_us=4_000_000_000_000_000))
            for index, error in errors:
                mine = and_(task_instance.c.run == run.id, task_instance.c.map_index == index)
                connection.execute(update(task_instance).where(mine).values(error=error, tries=1))

        await self.database.write(fail)

    def lack_slots_and_files(self) -> None:
        """Create a run `r` of the DAG `wants`, whose tasks wait for slots, a limit, a file and a trigger."""
        self.wait(self._lack())

    async def _lack(self) -> None:
        call, player = self.database.call, self.player
        worker = await call(BeginSession("worker", "w-east-1", "alpha.example", "boot", 5, ("default", "gpu"), 2))
        triggerer = await call(BeginSession("triggerer", "t-east-1", "beta.example", "boot", 9, (), 1000))
        await call(SetPool("narrow", 3))
        await player.create(dag(task("load", pool="narrow", pool_slots=2), id="holds"), run_id="r")
        await player.schedule()
        tasks = (
            task("pooled", pool="narrow", pool_slots=2),
            task("limited", max_active_per_dag=1),
            task("lost", queue="gpu"),
            task("deferred"),
        )
        await player.create(dag(tasks[1], id="wants"), run_id="q")
        await player.schedule()
        await player.create(dag(*tasks, id="wants"), run_id="r")
        (attempt,) = [one for one in await player.claim() if one.task_id == "deferred"]
        await player.report(attempt, Deferral("my.Poll", '{"url":"https://host"}', "resume", timeout_us=3_600_000_000))
        await call(ClaimTriggers(triggerer, 1, 10))
        await call(StoreFile("sales.py", "digest"))
        await call(ReportFiles(worker, ("wants.py",), ("sales.py",)))

    def run_map(self, dag_id: str, length: int, *failing: int) -> None:
        """Run a DAG whose task `m` is mapped over a list; these elements fail."""
        over = MapStructure(("x",), (MapSource("literal", length=length),))
        self.wait(self.player.create(dag(task("m", mapped=over), task("z", "m"), id=dag_id), run_id="r"))
        failure = Failure("Traceback\nValueError: no", may_retry=False)
        self.wait(self.player.play(lambda one: failure if one.map_index in failing else Success()))

    def open_group(self, dag_id: str) -> None:
        """Create a run of a DAG with the mapped group `g` of `g.get`, `g.fit` and `g.put`: 2 of 12 elements succeeded.

        `g.fit[2]` and `g.fit[3]` have failed, `g.put[4]`, `g.fit[5]` and `g.get[6]` to `g.get[9]` run.
        """
        self.wait(self._open_group(dag_id))

    async def _open_group(self, dag_id: str) -> None:
        tasks = (
            group(MapSource("xcom", "list", "return_value"), id="g", max_outstanding=6),
            part("g.get", group="g"),
            part("g.fit", "g.get", group="g", retries=1),
            part("g.put", "g.fit", group="g"),
            task("list"),
            task("page", "g.put"),
        )
        await self.player.create(dag(*tasks, id=dag_id, groups={"g": "g"}), run_id="r")
        running = {"g.put": (4,), "g.fit": (5,), "g.get": range(6, 12)}
        while claimed := [one for one in await self.player.claim() if one.dag_id == dag_id]:
            for one in claimed:
                if one.map_index in running.get(one.task_id, ()):
                    continue
                xcoms = (("return_value", json.dumps(list(range(12)))),) if one.task_id == "list" else ()
                failed = one.task_id == "g.fit" and one.map_index in (2, 3)
                error = Failure(f"Traceback\nValueError: too small {SCRIPT}", may_retry=False)
                await self.player.report(one, error if failed else Success(), xcoms=xcoms)

    def open_loop(self, dag_id: str) -> None:
        """Create a run of a DAG with the loop `epoch`: two iterations have ended, `epoch.train` of the third runs."""
        self.wait(self._open_loop(dag_id))

    async def _open_loop(self, dag_id: str) -> None:
        over = MapStructure(("loop",), (MapSource("loop"),), 1, loop=LoopStructure(30, "epoch.loop_gate"))
        tasks = (
            TaskStructure("epoch", "LoopedTaskGroup", pool_slots=0, mapped=over, is_group=True),
            part("epoch.train", group="epoch"),
            part("epoch.loop_gate", "epoch.train", group="epoch"),
            task("report", "epoch.loop_gate"),
        )
        await self.player.create(dag(*tasks, id=dag_id, groups={"epoch": "epoch"}), run_id="r")
        for loss in (0.9, 0.9, 0.63, 0.63):
            (one,) = [each for each in await self.player.claim() if each.dag_id == dag_id]
            is_gate = one.task_id.endswith("gate")
            value = {"done": False, "reason": f"the loss is {loss}"} if is_gate else {"loss": loss}
            label = f"goes on: the loss is {loss} {SCRIPT}, result {{'loss': {loss}}}" if is_gate else None
            await self.player.report(one, Success(), xcoms=(("return_value", json.dumps(value)),), label=label)
        await self.player.claim()

    def open_iteration(self, dag_id: str) -> None:
        """Create a run of a DAG whose task `calls` runs 1,000 elements in an attempt: 4 have ended, 20 run."""
        self.wait(self._open_iteration(dag_id))

    async def _open_iteration(self, dag_id: str) -> None:
        over = MapStructure(("x",), (MapSource("literal", length=1000),), iterated=True)
        tasks = (task("calls", mapped=over, retries=1), task("add", "calls"))
        await self.player.create(dag(*tasks, id=dag_id), run_id="r")
        (one,) = [each for each in await self.player.claim() if each.dag_id == dag_id]
        began_us = int(time.time() * 1e6)
        parts = (
            KeptPart(0, "success", 1, '"zero"', None, began_us),
            KeptPart(1, "failed", 2, None, f"ValueError: {SCRIPT}", began_us),
            KeptPart(2, "up_for_retry", 1, None, "ConnectionError: the server is down", began_us),
            KeptPart(3, "success", 2, '"three"', None, began_us),
            KeptPart(4, "skipped", 1, None, "nothing to do", began_us),
        )
        await self.player.store.call(KeepParts(one.task, one.epoch, parts, 100, 20))
        await self._log(one, "element 1 failed in try 2")

    def fail_callback(self, dag_id: str) -> int:
        """Let a run of a DAG end whose callback writes a line and fails; return the number of the callback."""
        return self.wait(self._fail_callback(dag_id))

    async def _fail_callback(self, dag_id: str) -> int:
        player = self.player
        await player.create(dag(task("only"), id=dag_id, callbacks=("on_success",)), run_id=RUN)
        await player.report(await player.claim_one(), Success())
        (claimed,) = await player.claim()
        assert claimed.callback is not None
        number = claimed.callback.id
        data = zlib.compress(encode_line(1_700_000_000_000_000, "info", "stdout", f"sending {SCRIPT}"))
        log_end = LogPart(0, 0, number * PART_BASE, 0, data, 1, last=True)
        await player.turn(
            callbacks=(CallbackReport(number, f"ConnectionError: the chat is down {SCRIPT}", False, log_end),)
        )
        return number

    def append_log(self, task_number: int, number: int, text: str) -> None:
        line = encode_line(1_700_000_001_000_000, "error", "stderr", text)
        self.call(AppendLog((LogPart(task_number, 1, number, 0, zlib.compress(line), 1),)))

    def succeed(self, attempt: ClaimedAttempt) -> None:
        self.wait(self.player.turn(AttemptReport(attempt.task, attempt.epoch, Success())))

    def close(self) -> None:
        self.wait(self.database.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


@contextmanager
def played_store(folder: Path, **debug: Any) -> Iterator[PlayedStore]:
    """Yield a store with a run under way."""
    store = PlayedStore(folder, **debug)
    try:
        store.fill()
        yield store
    finally:
        store.close()
