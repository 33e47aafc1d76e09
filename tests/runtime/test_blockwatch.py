"""The watch over a loop, on a real loop that is really blocked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from tests.until import until

from tidemill.core.blocking import Cause
from tidemill.runtime.blockwatch import Block, BlockWatch
from tidemill.runtime.durations import DURATION_BOUNDS

pytestmark = pytest.mark.alone


class Found:
    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.over: list[Block] = []
        self.watch = BlockWatch(0.2, self.blocks.append, self.over.append)


@pytest.fixture
async def found():
    found = Found()
    watch = found.watch
    watch.start()
    yield found
    watch.close()


async def after(step) -> None:
    await asyncio.sleep(0.1)
    step()
    await asyncio.sleep(0.1)


def wait_in_a_call() -> None:
    time.sleep(0.8)


def compute() -> None:
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        sum(range(1000))


@pytest.mark.parametrize(("step", "cause"), [(wait_in_a_call, Cause.WAITING), (compute, Cause.COMPUTING)])
async def test_who_blocks_the_loop_is_named_with_its_stack_while_it_does(found, step, cause):
    for _ in range(10):  # a machine that is busy with something else may be to blame once
        await asyncio.create_task(after(step), name="the culprit")
        if any((block.task, block.cause) == ("the culprit", cause) for block in found.blocks[-1:]):
            break
    await until(lambda: found.over)
    block, over = found.blocks[-1], found.over[-1]
    assert (block.task, block.cause) == ("the culprit", cause)
    assert step.__name__ in block.stack
    assert "run_forever" not in block.stack
    assert over.seconds >= 0.75
    assert block.seconds < over.seconds, "it was told before it was over"
    lags = found.watch.lags
    assert sum(lags.counts[DURATION_BOUNDS.index(0.5) :]) >= 1, "how late the loop was is counted"
    assert sum(lags.counts) > 2, "also when it was not late"


async def test_a_loop_that_waits_for_something_is_not_blocked(found):
    await asyncio.sleep(0.7)
    assert found.blocks == []


async def test_a_callback_that_blocks_has_no_task(found):
    asyncio.get_running_loop().call_later(0.1, time.sleep, 0.8)
    await asyncio.sleep(1.0)
    assert found.blocks[-1].task is None


STARVED = """
import asyncio, os, sys, time
from tidemill.runtime.blockwatch import BlockWatch
found = 0
def tell(block):
    global found
    found += 1
    print(block.cause.value, flush=True)
async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    os.nice(19)  # only now: what starves is the loop, not the start of Python
    watch = BlockWatch(0.05, tell)
    watch.start()
    while found < 3:  # short steps: no step of its own is long
        sum(range(20000))
        await asyncio.sleep(0)
    os._exit(0)  # at this priority Python takes seconds to end
os.sched_setaffinity(0, {int(sys.argv[1])})
asyncio.run(main())
"""


def test_a_loop_that_gets_no_cpu_blames_nobody():
    """Busy processes of normal priority share one CPU with a loop of the lowest."""
    cpu = min(os.sched_getaffinity(0))
    hog = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    starved = subprocess.Popen(
        [sys.executable, "-c", STARVED, str(cpu)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    hogs: list[subprocess.Popen[bytes]] = []
    try:
        assert starved.stdout is not None
        assert starved.stdout.readline() == "ready\n"
        hogs += [subprocess.Popen([sys.executable, "-c", hog], stdout=subprocess.PIPE) for _ in range(2)]
        for process in hogs:  # they run by now
            assert process.stdout is not None
            process.stdout.readline()
        out, err = starved.communicate("go\n", timeout=100)
    finally:
        starved.kill()
        starved.wait()
        for process in hogs:
            process.kill()
            process.wait()
    causes = out.split()
    assert starved.returncode == 0, err
    assert "computing" not in causes
    assert causes.count("starved") > len(causes) / 2, causes
