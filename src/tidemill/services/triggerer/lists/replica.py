"""One process's part in running a list: wait until it may run the list, run it, hand it over, wait again.

Invariants: a `ListHost` belongs to one session and is not reused after it; the list in effect is the last one that was
read without an error; a refused reload changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.services.triggerer.lists.admission import digest_list
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.sessions import Ownership, SessionEndedError, describe_session
from tidemill.services.triggerer.lists.turns import HostStopsError
from tidemill.store.records import TriggerSpec

log = structlog.get_logger(__name__)

#: How long a host whose triggers were fenced waits to learn that another host owns the list.
DISOWNED_SECONDS = 5.0


class Replica:
    """Runs a list whenever this process owns it.

    Args:
        ownership: Decides which process runs the list.
        create: Returns a host for the current session.
        read: Reads the list again; called on a thread.
        beside: A background task that runs while the list runs here; None: no task.
    """

    def __init__(
        self,
        ownership: Ownership,
        create: Callable[[], ListHost],
        read: Callable[[], list[TriggerSpec]],
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._beside = beside
        self._ownership = ownership
        self._create = create
        self._read = read
        self._specs: list[TriggerSpec] = []
        self._reading: asyncio.Task[None] | None = None
        self._reload_wanted = self._stopped = False
        self.host: ListHost | None = None

    async def run(self, specs: list[TriggerSpec]) -> None:
        """Run the list until no trigger is left to run and no reload is in progress.

        Raises:
            ConfigError: The list cannot run alongside another list.
        """
        self._specs = specs
        while True:
            await self._ownership.acquire(digest_list(self._specs))
            host = self._create()
            self._ownership.compare_tokens(lambda host=host: host.tokens, host.hand_over)  # type: ignore[misc]
            if await self._wait_until_over(host):
                return
            await self._ownership.pause()
            await host.stop(CancelReason.HAND_OVER)
            self.host = None

    async def _wait_until_over(self, host: ListHost) -> bool:
        """Wait until nothing is left to do (True) or another process owns the list (False)."""
        living = asyncio.ensure_future(self._run_host(host))
        lost = asyncio.ensure_future(self._ownership.wait_lost())
        beside = asyncio.create_task(self._run_beside(), name="beside the list")
        try:
            await asyncio.wait({living, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return False
            try:
                living.result()
            except SessionEndedError:
                return False
            if host.disowned:
                # The triggers may have ended because another host now owns the list; a heartbeat finds out.
                await asyncio.wait({lost}, timeout=DISOWNED_SECONDS)
            if lost.done():
                return False
            log.info("no triggers are left to run; the host exits")
            return True
        finally:
            for task in (living, lost, beside):
                task.cancel()
            await asyncio.wait({living, lost, beside})
            if not living.cancelled():
                living.exception()

    async def _run_beside(self) -> None:
        if self._beside is None:
            return
        try:
            await self._beside()
        except Exception:
            log.exception("removing old rows failed and is not retried; the triggers keep running")

    async def _run_host(self, host: ListHost) -> None:
        # Set just before the start takes the first turn, so that a concurrent reload comes after it.
        self.host = host
        await host.start(self._specs)
        while True:
            await host.wait_idle()
            if self._reading is None:
                return
            await asyncio.wait([self._reading])

    def read_again(self) -> None:
        """Reload the list; call it on the loop. Calls while the list is being read count as one."""
        if self._stopped:
            return
        self._reload_wanted = True
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_all(), name="reload")

    async def _read_all(self) -> None:
        try:
            while self._reload_wanted:
                self._reload_wanted = False
                await self._read_once()
        except Exception:
            log.exception("the list of triggers could not be reloaded; the old one stays in effect")
        finally:
            self._reading = None

    async def _read_once(self) -> None:
        try:
            found = await asyncio.to_thread(self._read)
            changes = await self.host.reload(found) if self.host is not None else None
        except ConfigError as error:
            text = str(error)  # the error is in the list: a traceback adds nothing
            log.error("the list of triggers is invalid; the old one stays in effect", error=text)  # noqa: TRY400
            return
        except (HostStopsError, SessionEndedError):
            changes = None  # it applies from the next turn
        self._specs = found
        self._ownership.relist(digest_list(found))
        if changes is None:
            log.info("the list of triggers was reloaded; it takes effect when this host runs the list")
            return
        log.info(
            "the list of triggers was reloaded",
            started=changes.started,
            removed=changes.removed,
            replaced=changes.replaced,
        )

    async def stop(self) -> int:
        """Stop the list, and release it to other processes.

        Returns:
            How many events may not be stored.
        """
        self._stopped = True
        unconfirmed = await self.host.stop() if self.host is not None else 0
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._ownership.release()
        return unconfirmed

    def report(self) -> dict[str, Any]:
        """Return the list's name, and the session that this process waits for (None: it waits for none)."""
        holder = self._ownership.holder
        return {
            "list": self._ownership.list_name,
            "waits_for": describe_session(holder) if holder is not None else None,
        }
