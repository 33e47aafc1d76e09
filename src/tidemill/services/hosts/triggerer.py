"""`tidemill triggerer`: one of any number of triggerers over one database.

This process opens the store and supervises the process that runs the triggers, so that a trigger that hangs or crashes
it is found here and not on one host after the other.
"""

from __future__ import annotations

from pathlib import Path

from tidemill.runtime.log.relayed_output import relayed_output
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.services.hosts.service import ServiceHost, run_service, serve_sessions
from tidemill.services.sessions.describing import describe_session
from tidemill.services.sessions.works import Work
from tidemill.services.supervision.call_socket import serve_calls
from tidemill.services.supervision.supervisor import ServiceFolder, ServiceSupervisor


def run_triggerer(about: ServiceFolder) -> ExitCode:
    """Run a triggerer until a signal.

    Raises:
        ConfigError: The settings are invalid, or the store cannot be shared.
        RemoteError: A part of the triggerer stopped.
    """
    return run_service("triggerer", about, _run)


async def _run(host: ServiceHost) -> None:
    with relayed_output("tidemill-triggerer-output") as output:
        async with serve_calls(host.store, host.calls) as address:
            await serve_sessions(host, HostedTriggerer(address, output))


class HostedTriggerer:
    """A triggerer in its sessions.

    Args:
        address: The socket on which this process answers calls.
        output: The descriptor to which the process that runs triggers writes its log.
    """

    def __init__(self, address: Path, output: int) -> None:
        self._address, self._output = address, output
        self._supervisor: ServiceSupervisor | None = None

    def build_works(self, host: ServiceHost, session: int) -> list[Work]:
        """Return the parts that run during a session."""
        request = describe_session("triggerer", host.name)
        supervisor = ServiceSupervisor(("triggerer",), host.about, host.store, self._address, self._output, request)
        self._supervisor = supervisor
        return supervisor.build_works(session)

    async def end(self) -> None:
        """Let the triggers clean up; the next triggerer runs them again."""
        if self._supervisor is not None:
            await self._supervisor.stop()
