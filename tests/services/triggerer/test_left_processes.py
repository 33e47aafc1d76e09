"""Programs that triggers started end with their process, whatever ends that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.until import wait_until

from tidemill.runtime.process.table import is_running

TRIGGERER = """
import asyncio, os, subprocess, sys
from tidemill.services.triggerer.tasks.left_processes import end_left_processes

async def main():
    with end_left_processes():
        shell = "setsid env -i sleep 600 >/dev/null 2>&1 & echo $!"
        print(*sorted(name for name in os.environ if "TIDEMILL" in name), flush=True)
        print(subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout, end="", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ends"])
def test_a_program_without_environment_and_parent_ends_with_the_triggerer(killed: bool) -> None:
    argv = [sys.executable, "-c", TRIGGERER]
    # As `dev` starts it: the rest of its group ends with it.
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TIDEMILL_STORE__URL": "postgresql://me:secret@host/db", "_TIDEMILL_LOG_RELAY": "1"},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "TIDEMILL_ENGINE_ID\n", "programs see no settings"
        left = int(process.stdout.readline())
        assert is_running(left)
        if killed:
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"
        wait_until(lambda: not is_running(left), what="it is gone")
    assert process.returncode == (-9 if killed else 0)
