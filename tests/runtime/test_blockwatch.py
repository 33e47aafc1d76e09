"""The watch over a loop, on a real loop that is really blocked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from tests.until import until, wait_until

from tidemill.core.blocking import BlockCause
from tidemill.runtime.loop.blockwatch import Block, BlockWatch
from tidemill.runtime.loop.durations import DURATION_BOUNDS

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


@pytest.mark.parametrize(("step", "cause"), [(wait_in_a_call, BlockCause.WAITING), (compute, BlockCause.COMPUTING)])
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
from tidemill.runtime.loop.blockwatch import BlockWatch
from tidemill.runtime.loop.durations import DURATION_BOUNDS
async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    os.nice(19)  # only now: what starves is the loop, not the start of Python
    watch = BlockWatch(0.2, lambda block: print(block.cause.value, flush=True))
    watch.start()
    often, first = False, DURATION_BOUNDS.index(0.25) + 1
    while True:  # short steps: no step of its own is long
        sum(range(2000))
        await asyncio.sleep(0)
        if not often and sum(watch.lags.counts[first:]) >= 3:
            often = True
            print("often late", flush=True)
os.sched_setaffinity(0, {int(sys.argv[1])})
asyncio.run(main())
"""


def test_a_loop_that_gets_no_cpu_blames_nobody(tmp_path):
    """Busy processes of normal priority share one CPU with a loop of the lowest."""
    cpu = min(os.sched_getaffinity(0))
    hog = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    said, hogs = tmp_path / "said", list[subprocess.Popen[bytes]]()

    def read() -> list[str]:
        return said.read_text().split("\n")[:-1]

    with said.open("wb") as out:
        starved = subprocess.Popen([sys.executable, "-c", STARVED, str(cpu)], stdin=subprocess.PIPE, stdout=out)
    try:
        wait_until(lambda: said.read_text() == "ready\n")
        hogs += [subprocess.Popen([sys.executable, "-c", hog], stdout=subprocess.PIPE) for _ in range(2)]
        for process in hogs:  # they run by now
            assert process.stdout is not None
            process.stdout.readline()
        assert starved.stdin is not None
        starved.stdin.write(b"go\n")
        starved.stdin.flush()
        # The watching thread starves as well: it may see nothing of that, however often.
        wait_until(lambda: "often late" in read(), 50.0, what="the loop is late")
        causes = [line for line in read() if line not in ("ready", "often late")]
    finally:
        starved.kill()
        starved.communicate()
        for process in hogs:
            process.kill()
            process.communicate()
    assert "computing" not in causes
    assert causes.count("starved") >= len(causes) / 2, causes
