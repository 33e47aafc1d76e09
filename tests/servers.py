"""The servers that all tests of a run share: one broker, one PostgreSQL, in a process of their own.

`python -m tests.servers` starts them, writes where they are as a line of JSON, and ends them with its standard input.
Runs that are given this line in their environment, as `TEST_SERVERS`, share them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.archives import use_broker_archive
from tests.store.server import PostgresServer

from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.testing.kafka import new_broker


class Servers:
    """The process of the servers, from the side of the tests."""

    #: Those that are shared, in this process and its forks; None: every process has its own.
    shared: Servers | None = None

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._places: dict[str, Any] = {}

    @classmethod
    def start(cls) -> Servers:
        """Start the process, which takes some seconds; `wait` waits for it. Servers that are given are used instead."""
        if cls.shared is not None:
            return cls.shared
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests, which need the servers at their end
        )
        return cls(process)

    @classmethod
    def use_given(cls) -> None:
        """Share the servers of which the environment says where they are, if it does."""
        if given := os.environ.pop("TEST_SERVERS", ""):
            cls(None)._share(given)

    def wait(self) -> None:
        """Wait until they are there, and share them with the forks of this process."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the servers that tests share could not be started; what they said is above")
        self._share(line)

    def _share(self, places: str | bytes) -> None:
        self._places = json.loads(places)
        Servers.shared = self
        PostgresServer.template = self.postgres.folder / "template"

    def close(self) -> None:
        """End them, if this process has started them."""
        if self._process is not None:
            self._process.communicate()

    @property
    def broker(self) -> EmbeddedBroker:
        """The broker; only its address and what needs no more can be used."""
        return EmbeddedBroker(Path(self._places["kafka"]), self._places["kafka_port"])

    @property
    def postgres(self) -> PostgresServer:
        """The PostgreSQL, which has the user `app`, too."""
        return PostgresServer(self._places["postgres_port"], Path(self._places["postgres"]))


@contextlib.contextmanager
def shared_postgres() -> Iterator[PostgresServer]:
    """Return the server of the run, or one of this process; no test may stop it."""
    if Servers.shared is not None:
        yield Servers.shared.postgres
        return
    server = PostgresServer(free_port(), makes_template=True)
    try:
        with ThreadPoolExecutor(1) as beside:  # the loop of a test may run in this thread
            beside.submit(asyncio.run, server.add_user()).result()
        yield server
    finally:
        server.remove()


def _serve() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which the servers would inherit: a JVM that ignores SIGTERM takes 20 s to be ended.
        signal.signal(number, lambda number, frame: None)
    use_broker_archive()
    with tempfile.TemporaryDirectory(prefix="tidemill-servers-") as folder, contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(1) as beside:
            starting = beside.submit(lambda: stack.enter_context(shared_postgres()))
            broker = new_broker(Path(folder))
            stack.callback(broker.kill)  # its data is removed, so it need not tidy up
            broker.start()
            postgres = starting.result()
        places = {
            "kafka": folder,
            "kafka_port": int(broker.bootstrap.rpartition(":")[2]),
            "postgres": str(postgres.folder),
            "postgres_port": postgres.port,
        }
        with os.fdopen(os.dup(1), "w") as told:
            os.dup2(2, 1)
            told.write(json.dumps(places) + "\n")
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
