"""`tidemill scheduler`: one of any number of schedulers over one database."""

from __future__ import annotations

from tidemill.runtime.process.exitcode import ExitCode
from tidemill.services.hosts.service import ServiceHost, run_service, serve_sessions
from tidemill.services.map_limits import build_map_limits
from tidemill.services.parser.service import ParserService
from tidemill.services.scheduler.scheduler import Scheduler
from tidemill.services.sessions.beginning import begin_session
from tidemill.services.sessions.describing import describe_session
from tidemill.services.sessions.observer import SessionObserver
from tidemill.services.sessions.works import Work
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.run_retention import RunRetention


def run_scheduler(about: ServiceFolder) -> ExitCode:
    """Run a scheduler, with a parser unless parsers run by themselves, until a signal.

    Raises:
        ConfigError: The settings are invalid, or the store cannot be shared.
        RemoteError: A part of the scheduler stopped.
    """
    return run_service("scheduler", about, _run)


async def _run(host: ServiceHost) -> None:
    parser = ParserService(host.about) if host.about.settings.dags.parser == "scheduler" else None
    try:
        await serve_sessions(host, HostedScheduler(parser))
    finally:
        if parser is not None:
            await parser.close()


class HostedScheduler:
    """A scheduler that also observes the sessions of all services, and removes old runs.

    Args:
        parser: The parser of the same process; None: parsers run by themselves.
    """

    def __init__(self, parser: ParserService | None) -> None:
        self._parser = parser

    def build_works(self, host: ServiceHost, session: int) -> list[Work]:
        """Return the parts that run during a session."""
        store, dags = host.store, host.about.settings.dags
        limits, missing_seconds = build_map_limits(dags), dags.missing_file_seconds
        parser = [] if self._parser is None else [("parser", self._parse(host, self._parser, session))]
        return [
            ("scheduler", Scheduler(store, store.doorbell, session, limits, missing_seconds).run()),
            ("observer of sessions", SessionObserver(store, session, host.lease).run()),
            ("retention", RunRetention(store, host.about.settings.store).run()),
            *parser,
        ]

    @staticmethod
    async def _parse(host: ServiceHost, parser: ParserService, session: int) -> None:
        own = await begin_session(host.store, describe_session("parser", host.name, session))
        await parser.run(host.store, own)

    async def end(self) -> None:
        """Do nothing: every turn is a transaction."""
