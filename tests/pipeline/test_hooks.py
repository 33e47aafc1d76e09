"""The hook runner: order, overlap, and errors of jobs."""

from __future__ import annotations

import asyncio
import time

from tests.until import until

from tidemill.pipeline.hooks import HookRunner, call_hook


async def finished(runner: HookRunner) -> None:
    await until(lambda: not runner.busy)


async def test_jobs_that_never_wait_run_in_order_in_one_task():
    runner = HookRunner()
    ran: list[tuple[int, object]] = []

    async def job(n: int) -> None:
        ran.append((n, asyncio.current_task()))

    for n in range(500):
        runner.submit(job, n)
    await finished(runner)
    assert [n for n, _ in ran] == list(range(500))
    assert len({task for _, task in ran[:60]}) == 1
    await runner.close()


async def test_jobs_that_wait_run_side_by_side():
    runner = HookRunner()
    gate = asyncio.Event()
    started: list[int] = []

    async def job(n: int) -> None:
        started.append(n)
        await gate.wait()

    for n in range(50):
        runner.submit(job, n)
    await until(lambda: len(started) >= 50)
    assert started == list(range(50))
    gate.set()
    await finished(runner)
    await runner.close()


async def test_a_job_may_use_timeouts_and_submit_more_jobs():
    runner = HookRunner()
    ran: list[str] = []

    async def inner() -> None:
        ran.append("inner")

    async def outer() -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            ran.append("timeout")
        runner.submit(inner)

    runner.submit(outer)
    await finished(runner)
    assert ran == ["timeout", "inner"]
    await runner.close()


async def test_a_failing_job_is_logged_and_the_others_continue(capsys):
    runner = HookRunner()
    ran: list[int] = []

    async def job(n: int) -> None:
        if n == 1:
            raise RuntimeError("a fault of ours")
        ran.append(n)

    for n in range(3):
        runner.submit(job, n)
    await finished(runner)
    assert ran == [0, 2]
    await runner.close()


async def test_close_cancels_what_waits_and_drops_what_is_queued():
    runner = HookRunner()
    cancelled: list[int] = []

    async def job(n: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(n)
            raise

    for n in range(3):
        runner.submit(job, n)
    await until(lambda: runner.running >= 3)
    await runner.close()
    assert sorted(cancelled) == [0, 1, 2]


async def test_idle_runners_are_used_again():
    runner = HookRunner()
    tasks: set[object] = set()

    async def job() -> None:
        tasks.add(asyncio.current_task())

    for _ in range(10):
        runner.submit(job)
        await finished(runner)
    assert len(tasks) == 1
    await runner.close()


async def test_jobs_that_take_long_give_the_loop_a_turn_after_each(monkeypatch):
    monkeypatch.setattr("tidemill.pipeline.hooks.TURN_SECONDS", 0.001)
    runner, loop = HookRunner(), asyncio.get_running_loop()
    since_turn, most, done = 0, 0, 0

    def turn() -> None:
        nonlocal since_turn
        since_turn = 0
        if done < 60:
            loop.call_soon(turn)

    async def slow_hook() -> None:
        nonlocal since_turn, most, done
        since_turn += 1
        most = max(most, since_turn)
        done += 1
        time.sleep(0.002)

    async def one() -> None:
        await call_hook(slow_hook(), runner.calls, "one")

    async def several() -> None:
        for _ in range(10):
            await call_hook(slow_hook(), runner.calls, "several")
            if runner.is_turn_due:
                await runner.give_turn()

    turn()
    for _ in range(3):
        runner.submit(several)
    for _ in range(30):
        runner.submit(one)
    await finished(runner)
    assert done == 60
    assert most == 1
    await runner.close()


async def test_a_job_that_rests_holds_up_no_other():
    runner = HookRunner()
    order: list[str] = []

    async def restless() -> None:
        while "other" not in order:
            order.append("rest")
            await runner.give_turn()

    async def other() -> None:
        order.append("other")

    runner.submit(restless)
    runner.submit(other)
    await finished(runner)
    assert len(order) <= 5
    await runner.close()


async def test_close_ends_a_job_that_rests():
    runner = HookRunner()

    async def restless() -> None:
        while True:
            await runner.give_turn()

    runner.submit(restless)
    await until(lambda: runner.running)
    await runner.close()
    assert runner.running == 0
