"""`tidemill worker`: one of any number of workers over one database."""

from __future__ import annotations

from tidemill.config.known_secrets import KnownSecrets
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.services.hosts.service import ServiceHost, note_lost, run_service
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.store_link import WorkerFencedError
from tidemill.services.worker.worker_session import WorkerSession, read_config
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup


def run_worker(about: ServiceFolder, secrets: KnownSecrets) -> ExitCode:
    """Run a worker until a signal.

    Args:
        about: The folder and the settings.
        secrets: The secrets that this process masks; those of tasks are added.

    Raises:
        ConfigError: The settings are invalid, or the store cannot be shared.
    """

    async def run(host: ServiceHost) -> None:
        await _run(host, secrets)

    return run_service("worker", about, run)


async def _run(host: ServiceHost, secrets: KnownSecrets) -> None:
    settings, folder = host.about.settings, host.about.folder
    config, drain_seconds = read_config(settings, folder), settings.worker.drain_timeout_seconds
    zygote = ZygoteClient(Setup(PRELOADS, tuple(settings.worker.preload), (str(folder),)))
    request = host.describe()
    try:
        while not host.stop.is_set():
            session = WorkerSession(
                config, drain_seconds, request, host.calls, zygote, secrets, lambda: host.health.note(works=True)
            )
            try:
                await session.run(host.stop)
            except WorkerFencedError:
                await note_lost(host)
    finally:
        await zygote.close()
