"""Services in processes of their own over one PostgreSQL, as on several hosts; tests kill and freeze them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text
from tests import prepared
from tests.until import wait_until

from tidemill.runtime.process.table import find_marked, is_running
from tidemill.store.database import Database

_MARK = "TIDEMILL_TEST_FLEET"
#: What Python imports at its start.
_CLOCK = """
import time
read = time.time_ns
time.time_ns = lambda: read() + {ahead} * 10**9
time.time = lambda: time.time_ns() / 1e9
"""
#: Counts changes of tasks that had succeeded.
AGAIN = """
SELECT count(*) FROM task_journal AS a JOIN task_journal AS b ON b.task = a.task AND b.epoch > a.epoch
WHERE a.after = 'success'
"""


class Fleet:
    """The services of a database.

    Args:
        folder: Has the DAG files in `dags`, and the logs of the services.
        url: The database.
        lease_seconds: The lease of all sessions.
    """

    def __init__(self, folder: Path, url: str, lease_seconds: float) -> None:
        self.folder = folder
        (folder / "dags").mkdir()
        self._settings = {
            "TIDEMILL_STORE__URL": url,
            "TIDEMILL_SERVICES__LEASE_SECONDS": str(lease_seconds),
            "TIDEMILL_METRICS__ENABLED": "false",
            "TIDEMILL_DEBUG__ENABLED": "false",
            "TIDEMILL_TRIGGERER__BLOCK_LIMIT_SECONDS": "20",
        }
        self.services: dict[str, prepared.Forked] = {}

    def write(self, text: str) -> None:
        """Write the DAG file."""
        (self.folder / "dags" / "d.py").write_text(text)

    def start(self, name: str, *, clock: int = 0, **settings: str) -> None:
        """Start a service; the name begins with its kind: `worker-1`.

        Args:
            name: Its name.
            clock: How far the clock of its host is ahead, in seconds.
            settings: Environment variables.
        """
        command = [name.partition("-")[0], "--folder", str(self.folder / "dags")]
        env = self._build_environment() | settings | {"WORKER_ID": name, _MARK: str(self.folder)}
        code = prepared.TIDEMILL
        if clock:
            code = _CLOCK.format(ahead=clock) + code
            env["PYTHONPATH"] = self._write_clock(name, clock)
        with open(self.folder / f"{name}.log", "ab") as output:
            self.services[name] = prepared.start(
                command, cwd=self.folder, stdout=output, stderr=output, env=env, code=code
            )

    def _write_clock(self, name: str, ahead: int) -> str:
        """Write what shifts the clocks of the processes that a service starts; return the folders of their modules."""
        shim = self.folder / f"clock of {name}"
        shim.mkdir(exist_ok=True)
        (shim / "sitecustomize.py").write_text(_CLOCK.format(ahead=ahead))
        return os.pathsep.join([str(shim), *(folder or str(Path.cwd()) for folder in sys.path)])

    def run(self, *words: str) -> str:
        """Run a command on the database, and return its output."""
        command = [*words, "--folder", str(self.folder / "dags")]
        done = prepared.run_text(command, cwd=self.folder, env=self._build_environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _build_environment(self) -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")} | self._settings

    def kill(self, name: str) -> None:
        """Kill a service, as the loss of its host would."""
        process = self.services.pop(name)
        process.kill()
        process.wait()

    def freeze(self, name: str) -> None:
        """Suspend a service."""
        self.services[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a suspended service go on."""
        self.services[name].send_signal(signal.SIGCONT)

    def stop(self, name: str) -> int:
        """Stop a service, and return its exit code."""
        process = self.services.pop(name)
        process.terminate()
        return process.wait(60)

    def read_log(self, name: str) -> str:
        """Return the log of a service."""
        return (self.folder / f"{name}.log").read_text()

    def describe(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        """Kill all services, and wait until nothing of them is left."""
        for name in list(self.services):
            with contextlib.suppress(ProcessLookupError):
                self.thaw(name)
            self.kill(name)
        wait_until(lambda: not any(map(is_running, find_marked(f"{_MARK}={self.folder}"))), what="nothing is left")


@contextlib.contextmanager
def run_fleet(folder: Path, url: str, lease_seconds: float = 2.0) -> Iterator[Fleet]:
    """Yield services over a database; they end with the block."""
    fleet = Fleet(folder, url, lease_seconds)
    try:
        yield fleet
    finally:
        fleet.close()


async def count(store: Database, statement: str) -> int:
    """Return the number that a statement selects."""
    return int(await store.read(lambda connection: connection.execute(text(statement)).scalar_one()))


async def wait_for(store: Database, statement: str, wanted: int, what: object, seconds: float = 120.0) -> None:
    """Wait until a statement selects at least a number, which it must not exceed."""
    async with asyncio.timeout(seconds):
        while (found := await count(store, statement)) < wanted:
            await asyncio.sleep(0.1)
    assert found == wanted, what
