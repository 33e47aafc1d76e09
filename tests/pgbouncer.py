"""A real PgBouncer in front of a server of the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.store.server import PostgresServer

from tidemill.runtime.embedded.broker import free_port

#: `old` knows no prepared statements; `new` keeps those of its clients, and prepares them where they are missing.
VERSIONS = ("old", "new")
_FOLDER = Path(sys.prefix) / "pgbouncer"


class PgBouncer:
    """One that listens on 127.0.0.1 for every database of a server, and lets everybody in.

    Args:
        server: What it is in front of.
        pool_mode: `session`, `transaction` or `statement`.
        version: One of `VERSIONS`.
        options: Other settings; `default_pool_size` is 3 unless it is given.
    """

    def __init__(self, server: PostgresServer, pool_mode: str, version: str = "new", **options: object) -> None:
        self._program = _FOLDER / version / "pgbouncer"
        assert self._program.exists(), "PgBouncer is missing; scripts/install_poolers installs it"
        self.port = free_port()
        self._server = server
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-pgbouncer-"))
        self.configure(pool_mode, **options)
        if os.geteuid() == 0:
            user = pwd.getpwnam("pgserver")
            for path in (self._folder, self._settings):
                os.chown(path, user.pw_uid, user.pw_gid)
        self.start()

    def configure(self, pool_mode: str, **options: object) -> None:
        """Write the settings; a running one reads them when it is told to."""
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": pool_mode,
            "default_pool_size": 3,
            "server_login_retry": 0.1,
            **({"user": "pgserver"} if os.geteuid() == 0 else {}),  # it refuses to run as root
            **options,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        place = f"host={self._server.folder} port={self._server.port or 5432} user=postgres"
        self._settings.write_text("\n".join(["[databases]", f"* = {place}", "[pgbouncer]", *lines, ""]))

    @property
    def _settings(self) -> Path:
        return self._folder / "pgbouncer.ini"

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), "-q", str(self._settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def freeze(self) -> None:
        """Stop the process while its connections stay, until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
