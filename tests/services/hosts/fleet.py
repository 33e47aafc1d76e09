"""Services in processes of their own over one PostgreSQL, as on several hosts; tests kill and freeze them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.until import wait_until

from tidemill.runtime.process.table import find_marked, is_running

_MARK = "TIDEMILL_TEST_FLEET"


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
        self.services: dict[str, subprocess.Popen[bytes]] = {}

    def write(self, text: str) -> None:
        """Write the DAG file."""
        (self.folder / "dags" / "d.py").write_text(text)

    def start(self, name: str, **settings: str) -> None:
        """Start a service; the name begins with its kind: `worker-1`."""
        kind = name.partition("-")[0]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")}
        with open(self.folder / f"{name}.log", "ab") as output:
            self.services[name] = subprocess.Popen(
                [sys.executable, "-m", "tidemill", kind, "--folder", str(self.folder / "dags")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ | self._settings | settings | {"WORKER_ID": name, _MARK: str(self.folder)},
                start_new_session=True,
            )

    def run(self, *words: str) -> str:
        """Run a command on the database, and return its output."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")}
        command = [sys.executable, "-m", "tidemill", *words, "--folder", str(self.folder / "dags")]
        return subprocess.run(command, env=environ | self._settings, check=True, capture_output=True, text=True).stdout

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
