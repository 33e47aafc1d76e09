"""The socket on which a process answers the calls of the services that it supervises."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from tidemill.runtime.files.folders import OwnedFolder
from tidemill.store.database import Database, StoreClient
from tidemill.store.wire.call_server import CallServer

#: The longest path of a folder for temporary files in which a socket's path is short enough.
_MAX_ROOT_BYTES: Final = 64


@contextlib.asynccontextmanager
async def serve_calls(database: Database, store: StoreClient) -> AsyncIterator[Path]:
    """Answer calls on a socket of this process during the block; yields the socket's path.

    Args:
        database: Publishes the path to other processes.
        store: Answers the calls.
    """
    # A temporary folder, because the path of a socket is limited to about 100 bytes. If this process is killed, the
    # next one removes the folder.
    owned = OwnedFolder("tidemill-dev-", _choose_root())
    server = CallServer(store, owned.path / "store.sock")
    try:
        await server.start()
        database.publish(str(server.path))
        yield server.path
    finally:
        await server.close()
        owned.cleanup()


def _choose_root() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= _MAX_ROOT_BYTES else Path("/tmp")  # noqa: S108
