"""Probes messages for users, one message at a time.

Invariants: one probe runs at a time, and none after the engine starts to stop. A probe ends within its time limit,
together with everything that it started. A cancelled hook that does not end is abandoned; no further probe starts until
it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from tidemill.core.errors import UserActionError
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.routing import Router
from tidemill.pipeline.probing.probe_run import ProbeRun
from tidemill.pipeline.probing.report import tell
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.probe_report import PROBE_SECONDS, ProbeReport

log = structlog.get_logger(__name__)

#: How long the engine's shutdown waits for a probe to end.
END_SECONDS = 4.0


class Prober:
    """Probes messages over the parts of one engine.

    Args:
        context: The engine's parts.
        identity: The engine's identity.
        router: Finds the sinks of hooks' payloads.
        is_ready: Returns whether `on_ready` has returned.
        stop: Set when the engine stops.
    """

    def __init__(
        self,
        context: EngineContext,
        identity: EngineIdentity,
        router: Router,
        is_ready: Callable[[], bool],
        stop: asyncio.Event,
    ) -> None:
        self._context = context
        self._engine_id = identity.engine_id
        self._router = router
        self._is_ready = is_ready
        self._stop = stop
        self._ended: asyncio.Event | None = None
        self._left: asyncio.Future[None] | None = None

    async def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler without side effects.

        Args:
            message: The message; its payload is set.
            seconds: The time limit, up to `PROBE_SECONDS`.

        Raises:
            UserActionError: Another probe is running, or the engine is starting or stopping.
        """
        self._refuse()
        self._ended = asyncio.Event()
        seconds = min(seconds, PROBE_SECONDS)
        try:
            run = ProbeRun(self._context, self._engine_id, self._router, message, self._stop)
            try:
                await run.run(seconds)
                why = "the engine is stopping" if self._stop.is_set() else f"it did not end within {seconds:g} s"
                report = tell(run, why)
            finally:
                self._left = await run.end()
        finally:
            self._ended.set()
            self._ended = None
        return report

    def _refuse(self) -> None:
        if self._ended is not None:
            raise UserActionError("another message is being probed; try again later")
        if self._left is not None and not self._left.done():
            raise UserActionError(
                "a cancelled hook of an earlier probe has not ended; restart the engine to probe again"
            )
        if self._stop.is_set():
            raise UserActionError("it is draining")
        if not self._is_ready():
            raise UserActionError("it is starting: on_ready has not returned")

    async def close(self) -> None:
        """Wait a few seconds for a running probe, which the engine's shutdown ends."""
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._ended.wait()
