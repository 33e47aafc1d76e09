"""Triggers of a list, and of tasks, one of which harms the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import Hosts, spec
from tests.services.triggerer.test_task_host import Triggerers
from tests.until import until

from tidemill.core.retry import Backoff
from tidemill.services.triggerer.hosting.trigger_loop import TriggerLoop
from tidemill.store.engines.opening import open_store
from tidemill.store.records import TriggerState

HARMS = [(hosted.LeavingLater, "raised SystemExit: 3"), (hosted.CancellingAll, "cancelled tasks of others")]


@pytest.fixture
def run() -> Iterator[Callable[[Awaitable[None]], None]]:
    DID.clear()
    loop = TriggerLoop()
    yield loop.run_to_end  # type: ignore[misc]
    loop.close()
    DID.clear()


@pytest.mark.parametrize(("cls", "said"), HARMS)
def test_a_trigger_of_a_list_that_harms_the_others_fails_and_they_go_on(run, tmp_path: Path, cls: type, said: str):
    async def work() -> None:
        database = await open_store(f"sqlite:///{tmp_path}/store.db")
        hosts = Hosts(database)
        hosts.backoff = Backoff(0.001, 0.02)
        helped = spec("helped", hosted.Helped)
        host = await hosts.start(helped, spec("bad", cls), spec("good", hosted.Counting, count=1, then="wait"))
        record = await hosts.state("bad", TriggerState.FAILED)
        assert said in (record.error or "")
        # Its own task was cancelled by another trigger: it runs again though its restart is `never`.
        await hosts.state("helped", TriggerState.FINISHED)
        assert await hosts.payloads("helped") == ["helped"]
        assert host.running == 1
        await hosts.stop(host)
        await database.close()

    run(work())


@pytest.mark.parametrize(("cls", "said"), HARMS)
def test_a_trigger_of_a_task_that_harms_the_others_fails_it_and_they_go_on(run, tmp_path: Path, cls: type, said: str):
    async def work() -> None:
        triggerers = Triggerers(tmp_path)
        store = triggerers.store
        good = store.defer(hosted.Counting, count=0, then="wait")
        helped = store.defer(hosted.Helped)
        host = triggerers.start()
        await until(lambda: "yielded" in DID[good.claim.id] and "run" in DID[helped.claim.id])
        bad = store.defer(cls)

        await until(lambda: bad.error is not None)
        assert said in (bad.error or "")
        await until(lambda: helped.resumed)
        assert (helped.error, good.error, good.claims) == (None, None, 1)
        await triggerers.stop(host)

    run(work())


def test_what_a_plain_thread_cancels_fails_no_task_and_leaves_what_ran_to_the_parent(run, tmp_path: Path):
    async def work() -> None:
        triggerers = Triggerers(tmp_path)
        store = triggerers.store
        good = store.defer(hosted.Counting, count=0, then="wait")
        host = triggerers.start()
        await until(lambda: "yielded" in DID[good.claim.id])
        task, _ = triggerers.running.pop(host)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert (good.error, good.session, store.ended) == (None, 1, [])

    run(work())
