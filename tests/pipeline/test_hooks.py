"""The hook runner: order, overlap, and errors of jobs."""

from __future__ import annotations

import asyncio

from tests.until import until

from tidemill.pipeline.hooks import HookRunner


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
