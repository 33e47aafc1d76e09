"""`tidemill parser`: one of any number of parsers over one database."""

from __future__ import annotations

from tidemill.runtime.process.exitcode import ExitCode
from tidemill.services.hosts.service import ServiceHost, run_service, serve_sessions
from tidemill.services.parser.service import ParserService
from tidemill.services.sessions.works import Work
from tidemill.services.supervision.supervisor import ServiceFolder


def run_parser(about: ServiceFolder) -> ExitCode:
    """Run a parser until a signal.

    Raises:
        ConfigError: The settings are invalid, or the store cannot be shared.
        RemoteError: A part of the parser stopped.
    """
    return run_service("parser", about, _run)


async def _run(host: ServiceHost) -> None:
    parser = ParserService(host.about)
    try:
        await serve_sessions(host, HostedParser(parser))
    finally:
        await parser.close()


class HostedParser:
    """A parser in its sessions."""

    def __init__(self, parser: ParserService) -> None:
        self._parser = parser

    def build_works(self, host: ServiceHost, session: int) -> list[Work]:
        """Return the part that runs during a session."""
        return [("parser", self._parser.run(host.store, session))]

    async def end(self) -> None:
        """Do nothing: files that were being read are read again."""
