"""Runs the web UI on its own thread with its own event loop; no other part of the process waits for it.

Each process decides which sections it mounts; a driver's are in `pipeline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

import structlog
import uvicorn
from starlette.types import ASGIApp

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.errors import describe_error
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.connections import LimitedProtocol
from tidemill.web.pages import Pages
from tidemill.web.sections import Health, PageAbout, UiSection

log = structlog.get_logger(__name__)

#: How long an idle connection stays open for the next request.
_KEEP_ALIVE_SECONDS = 30
#: How long requests may take to finish at shutdown.
_END_SECONDS = 1
_MAX_HEAD_BYTES = 32 * 1024
#: How often the server checks its flags without being woken; also the precision of the Date header.
_TICK_SECONDS = 1.0


class _Server(uvicorn.Server):
    """A server that any thread can stop, without polling."""

    def __init__(self, config: uvicorn.Config, ended: asyncio.Event, sections: Sequence[UiSection]) -> None:
        super().__init__(config)
        self._ended = ended
        self._sections = sections

    async def main_loop(self) -> None:
        while not (await self.on_tick(0) or self._ended.is_set()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _TICK_SECONDS)
        for section in self._sections:
            if section.close is not None:
                section.close()
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.end_waiting()


class WebServer:
    """Serves an application.

    Args:
        listener: A listening socket; the server closes it at the end.
        settings: Users, tokens and allowed hosts.
        key: The key in the printed address; None if there are users or tokens.
        about: Describes the process.
        health: Answers probes.
        mount: Returns the sections; called on the loop, before any request is answered.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: DebugSettings,
        key: str | None,
        about: PageAbout,
        health: Health,
        mount: Callable[[Pages], Sequence[UiSection]],
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._origins = Origins(settings.host, settings.debug_url, tuple(settings.allowed_hosts))
        self._key = key
        self._about = about
        self._health = health
        self._mount = mount
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()

    def run(self) -> None:
        """Serve until `stop`; never raises."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            log.exception("the web UI failed; the pipeline continues without it", error=describe_error(error))
        finally:
            self._listener.close()

    def stop(self) -> None:
        """Ask the server to stop; callable from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        pages = Pages(self._about, self._origins.prefix)
        sections = self._mount(pages)
        config = uvicorn.Config(
            self._create_app(pages, sections),
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_END_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        await _Server(config, self._ended, sections).serve([self._listener])

    def _create_app(self, pages: Pages, sections: Sequence[UiSection]) -> ASGIApp:
        logins = Logins(self._key, self._settings.users, self._settings.tokens)
        return create_app(sections, pages, logins, self._origins, self._health, self._listener.getsockname()[1])
