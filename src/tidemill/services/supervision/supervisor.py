"""Keeps services running in processes of their own, which call the store through the socket of this process.

Invariants:
- The exit of a service is detected at once, and its work is released before it restarts.
- A service that hangs is killed.
- Every session of a service names the session of this process as its parent, and ends with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.services.sessions.releasing import note_stopping, release_rest
from tidemill.services.supervision.child import Child, Death
from tidemill.services.supervision.silence import wait_until_silent
from tidemill.services.supervision.trials import Trials
from tidemill.store.calls.service_calls import BeginSession, ListSessions, LoseSession, TrialKind
from tidemill.store.database import Database

log = structlog.get_logger(__name__)

_MODULES = {
    "worker": "tidemill.services.worker.process",
    "triggerer": "tidemill.services.triggerer.tasks.process",
}
#: How long the triggerer may take to release its triggers.
_TRIGGERER_SECONDS = 10.0
#: A service without a heartbeat for this long hangs; a triggerer also gets the time for which a trigger may block it.
_SILENT_SECONDS = 30.0
#: A process that has not begun its session by then hangs; before that it only imports modules of tidemill.
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ServiceFolder:
    """What services run with.

    Attributes:
        settings: The settings.
        folder: The folder of DAG files, absolute.
        config: The file of the settings; None if there is none.
    """

    settings: Settings
    folder: Path
    config: Path | None = None


class ServiceSupervisor:
    """Services in processes of their own.

    Args:
        kinds: The kinds of the services: `worker`, `triggerer`.
        about: Their folder and settings.
        store: The store.
        address: The socket on which this process answers calls.
        output: The descriptor to which the processes write their logs.
        session: The request that began the session of this process.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        about: ServiceFolder,
        store: Database,
        address: Path,
        output: int,
        session: BeginSession,
    ) -> None:
        self._store, self._settings, self._parent = store, about.settings, 0
        config = [] if about.config is None else ["--config", str(about.config)]
        rest = [str(address), "--folder", str(about.folder), *config]
        triggerer = about.settings.triggerer
        # The command line may have changed the settings of this process.
        of_triggerer = ["--capacity", str(triggerer.capacity), "--queues", ",".join(triggerer.queues)]
        limits = {"worker": [], "triggerer": of_triggerer}
        # A blocked triggerer reports the blocking trigger itself, long before this limit.
        silent_seconds = 1.5 * about.settings.triggerer.block_limit_seconds + _SILENT_SECONDS
        self._silent_seconds = {"worker": _SILENT_SECONDS, "triggerer": silent_seconds}
        self.children = [
            Child(kind, ["-m", _MODULES[kind], *rest, *limits[kind]], os.environ, output, self._note_death)
            for kind in kinds
        ]
        self.trials = Trials(
            store,
            ["-m", _MODULES["triggerer"], *rest, *of_triggerer],
            os.environ,
            output,
            msgspec.structs.replace(session, kind="triggerer", trial=TrialKind.SPLIT),
            queues=tuple(triggerer.queues),
            capacity=triggerer.capacity,
            silent_seconds=silent_seconds,
        )

    def build_works(self, parent: int) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the works that keep the services running, with their names; each runs until cancelled or `stop`.

        Args:
            parent: The session of this process.
        """
        self._parent = parent
        for child in self.children:
            child.arguments = (*child.arguments, "--parent", str(parent))
        trials = [("trials of triggers", self.trials.run(parent))] if self._has_triggerer else []
        return [
            *trials,
            *((child.name, child.run()) for child in self.children),
            *((f"watch of the {child.name}", self._watch(child)) for child in self.children),
        ]

    @property
    def _has_triggerer(self) -> bool:
        return any(child.name == "triggerer" for child in self.children)

    async def stop(self) -> None:
        """Stop the services: claims stop, attempts drain."""
        await note_stopping(self._store, self._parent)
        drains = {"worker": self._settings.worker.drain_timeout_seconds, "triggerer": _TRIGGERER_SECONDS}
        await asyncio.gather(*(child.stop(drains[child.name]) for child in self.children))

    def kill(self) -> None:
        """Kill the services without a restart."""
        for child in self.children:
            child.kill()

    async def _watch(self, child: Child) -> None:
        """Kill a hanging service, whose work its successor continues."""
        while True:
            await wait_until_silent(
                self._store,
                lambda one: (one.parent, one.pid) == (self._parent, child.pid),
                self._silent_seconds[child.name],
                find_process=lambda: child.pid,
                start_seconds=_START_SECONDS,
            )
            log.error(f"the {child.name} hangs: it has sent no heartbeat for too long; killing it", pid=child.pid)
            child.replace()

    async def _note_death(self, death: Death) -> None:
        """Release the work of a dead process, except triggers that may have caused its death."""
        for session in await self._store.call(ListSessions()):
            if (session.parent, session.pid) == (self._parent, death.pid):
                is_death = session.kind == "triggerer" and not death.explained
                if is_death:
                    is_death = await self.trials.note_death(session.id, death)
                await self._store.call(LoseSession(session.id, is_death=is_death))
        await release_rest(self._store)
