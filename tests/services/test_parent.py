"""A service ends with its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidemill.runtime.process.exitcode import ExitCode

_CODE = """
import time
from tidemill.services.parent import watch_parent

def fail():
    print("gone", flush=True)
    raise BrokenPipeError

watch_parent(fail, {grace})
print("up", flush=True)
while True:  # as a loop that is blocked
    time.sleep(600)
"""


@pytest.mark.parametrize("grace", [0.0, 0.1])
def test_a_process_ends_with_its_parent_whatever_happens_when_it_notices(grace: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE.format(grace=grace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdin.close()
    assert process.wait(60) == ExitCode.STOPPED
    assert process.stdout.read() == "gone\n"
    process.stdout.close()
