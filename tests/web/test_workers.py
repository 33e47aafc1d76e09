"""Blocking work is done on threads that keep nothing from ending, a few at a time, each for a limited time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.until import until
from tests.web.scripted_pipeline import ScriptedPipeline
from tests.web.serving import log_in, make_app

from tidemill.web.problems import RequestProblem, answer_problem
from tidemill.web.routes import Routes
from tidemill.web.sections import UiSection
from tidemill.web.workers import BlockingRoute, Workers, is_over


async def test_work_is_done_on_another_thread_that_is_a_daemon() -> None:
    def work(value: int, *, add: int) -> tuple[int, bool, bool]:
        thread = threading.current_thread()
        return value + add, thread.daemon, thread is threading.main_thread()

    assert await Workers().run(work, 1, add=2) == (3, True, False)


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("its own"), RequestProblem(404, "gone")])
async def test_what_the_work_raises_is_raised(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await Workers().run(fail)
    assert caught.value is error


async def test_what_no_future_takes_is_raised_as_another_error() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await Workers().run(lambda: next(iter(())))


async def test_work_without_a_free_thread_is_refused_and_a_thread_is_free_once_its_work_ends() -> None:
    workers, go_on = Workers(threads=1, wait_seconds=0.01), threading.Event()
    first = asyncio.create_task(workers.run(go_on.wait, 60))
    await until(lambda: workers._free.locked())
    with pytest.raises(RequestProblem, match="busy") as caught:
        await workers.run(lambda: None)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "5"})
    go_on.set()
    assert await first is True
    await until(lambda: not workers._free.locked())
    assert await workers.run(lambda: 7) == 7


async def test_work_whose_time_is_over_is_told_so_and_counts_until_it_ends() -> None:
    workers, seen, go_on = Workers(threads=1, seconds=0.01), [], threading.Event()

    def work() -> None:
        go_on.wait(60)
        seen.append(is_over())

    with pytest.raises(RequestProblem, match=r"longer than 0\.01 s") as caught:
        await workers.run(work)
    assert caught.value.status == 504
    assert workers._free.locked()
    go_on.set()
    await until(lambda: not workers._free.locked())
    assert seen == [True]


async def test_work_of_a_request_that_was_given_up_is_told_so() -> None:
    seen: list[bool] = []
    router = Routes(route_class=BlockingRoute)
    begun, go_on = threading.Event(), threading.Event()

    @router.get("/slow")
    def work() -> None:
        begun.set()
        go_on.wait(60)
        seen.append(is_over())

    pipeline = ScriptedPipeline()
    app: Any = make_app(pipeline, [UiSection([], Routes(), router)])
    async with log_in(pipeline, app) as client:
        app._app._request_seconds = 0.01
        answer = await client.get("/api/v1/slow")
        assert answer.status_code == 408
        assert answer.headers["content-type"] == "application/problem+json"
        go_on.set()
        await until(lambda: seen)
    assert seen == [True]
    assert begun.is_set()


async def test_pages_are_built_by_the_workers() -> None:
    pipeline = ScriptedPipeline()
    workers = Workers(threads=1, wait_seconds=0.01)
    app = make_app(pipeline, workers=workers)
    go_on = threading.Event()
    async with log_in(pipeline, app) as client:
        client.headers["Accept"] = "text/html"
        other = asyncio.create_task(workers.run(go_on.wait, 60))
        await until(lambda: workers._free.locked())
        statuses = [(await client.get(path)).status_code for path in ("/messages", "/letters", "/", "/healthz")]
        go_on.set()
        await other
        after = await client.get("/messages")
    assert statuses == [503, 503, 200, 200]
    assert after.status_code == 200


def test_outside_of_workers_nothing_is_over() -> None:
    assert is_over() is False


def test_a_process_ends_while_work_is_under_way() -> None:
    program = """
import asyncio, contextlib, threading
from tidemill.web.workers import Workers
async def main():
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(Workers().run(threading.Event().wait), 0.01)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_a_problem_is_one_line_whatever_a_user_or_a_library_said() -> None:
    answer = answer_problem(422, "cursor: not a cursor:\n  a\r\nb \x1b[31m\n")
    assert json.loads(answer.body)["detail"] == "cursor: not a cursor: a b \\x1b[31m"
