"""A folder with a list of triggers, and hosts that run it as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests import prepared
from tests.until import LIMIT_SECONDS, wait_until

TRIGGERS = """
import asyncio, os, time
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from tidemill.triggers.shared_stream import SharedStreamProducer

class Fires(BaseTrigger):
    def __init__(self, count=3, then="wait"):
        super().__init__()
        self.count, self.then = count, then
    def serialize(self):
        return "mine.Fires", {"count": self.count, "then": self.then}
    async def run(self):
        for n in range(self.count):
            yield TriggerEvent({"n": n})
        if self.then == "wait":
            await asyncio.Event().wait()
        if self.then == "block":
            time.sleep(1.5)
            await asyncio.Event().wait()
    async def on_kill(self):
        open("killed", "w").close()
    async def cleanup(self):
        open(f"cleaned-{self.trigger_id}", "w").close()

class Odd(BaseTrigger):
    def serialize(self):
        return "mine.Odd", {}
    async def run(self):
        for n in range(2000):
            yield TriggerEvent("x" * 100, identity=f"\\x1b[2J{n}")
        raise ExceptionGroup("both", [ValueError("first"), KeyError("last" * 1000)])

class Leaves(BaseTrigger):
    def serialize(self):
        return "mine.Leaves", {}
    async def leave(self):
        raise SystemExit(5)
    async def run(self):
        loop = asyncio.get_running_loop()
        self.left = loop.create_task(self.leave())
        loop.call_soon(exit, 5)
        await asyncio.sleep(0.1)
        yield TriggerEvent("went on")

class Debugged(BaseTrigger):
    def serialize(self):
        return "mine.Debugged", {}
    async def run(self):
        yield TriggerEvent(asyncio.get_running_loop().get_debug())

class Source(SharedStreamProducer):
    async def open_stream(self):
        yield "first", 0
        await asyncio.Event().wait()
    async def advance(self, batch):
        pass

class Holds(BaseEventTrigger):
    def serialize(self):
        return "mine.Holds", {}
    def shared_stream_key(self):
        return "upstream"
    @classmethod
    def create_shared_stream_producer(cls, kwargs):
        return Source()
    async def filter_shared_stream(self, stream):
        async for event in stream:
            await asyncio.Event().wait()
            yield
    async def run(self):
        yield
"""


class Site:
    """A folder with a list of triggers, and hosts that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "runtime"), "PYTHONWARNINGS": "ignore"}
        (folder / "runtime").mkdir(mode=0o700)
        (folder / "mine.py").write_text(TRIGGERS)
        self.hosts: list[prepared.Forked | subprocess.Popen[bytes]] = []

    def write(self, *entries: str) -> None:
        (self.folder / "spec.yaml").write_text("".join(f"- {{{entry}}}\n" for entry in entries) or "[]\n")

    def host(self, **env: str) -> prepared.Forked:
        """Start a host."""
        with (self.folder / "log.txt").open("ab") as log:
            process = prepared.start(
                ["triggers", "run", "spec.yaml"], cwd=self.folder, env={**self.env, **env}, stdout=log, stderr=log
            )
        self.hosts.append(process)
        return process

    def new_host(self) -> subprocess.Popen[bytes]:
        """Start a host from nothing, with all that it imports."""
        with (self.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", "triggers", "run", "spec.yaml"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.hosts.append(process)
        return process

    def ask(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return prepared.run_text(["triggers", *words], cwd=self.folder, env={**self.env, **env})

    def rows(self, *words: str) -> list[dict[str, object]]:
        done = self.ask(*words, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def until(self, condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
        wait_until(condition, seconds, what=lambda: self.log, pause_seconds=0.05)
