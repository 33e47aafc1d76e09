"""The parser of a folder, with the zygote that forks the processes which read files."""

from __future__ import annotations

from tidemill.services.parser.manager import ParserManager
from tidemill.services.parser.reading import PRELOAD
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.database import StoreCalls


class ParserService:
    """Keeps a store up to date with the DAG files of a folder.

    Create it before threads and connections: its zygote inherits none then.

    Args:
        about: The folder and the settings.
    """

    def __init__(self, about: ServiceFolder) -> None:
        self._about = about
        self.zygote = ZygoteClient(Setup(tuple(PRELOAD)))
        self.manager: ParserManager | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all files that were present at the start have been read and stored."""
        return self.manager is not None and self.manager.ready.is_set()

    async def run(self, store: StoreCalls, session: int | None = None) -> None:
        """Read files until cancelled.

        Args:
            store: The store.
            session: The session of the parser; None: it is the only one of the store.
        """
        if self.zygote.pid is None:
            await self.zygote.start()
        dags = self._about.settings.dags
        self.manager = ParserManager(
            store,
            self.zygote,
            self._about.folder,
            dags.parse_timeout_seconds,
            dags.paused_at_creation,
            dags.reparse_seconds,
            session,
            self._about.settings.services.lease_seconds,
        )
        await self.manager.run()

    async def close(self) -> None:
        """End the zygote and all processes that read files."""
        await self.zygote.close()
