"""Where the DAGs of a folder are stored, and how a process reaches that store.

Invariant: a SQLite file has one writer. Who comes second sends its calls to the first, over that one's socket.
"""

from __future__ import annotations

from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError

DEFAULT_NAME = "dags.db"


def choose_folder(settings: Settings, given: Path | None) -> Path:
    """Return the folder of DAG files, absolute.

    Args:
        settings: `dags.folder` is read.
        given: What the command line says; None: nothing.

    Raises:
        ConfigError: It is not a folder.
    """
    folder = Path(settings.dags.folder) if given is None else given
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{folder} is not a folder; name the folder that contains the DAG files")
        raise ConfigError(
            f"there is no folder {folder}; create it, name another one, or begin with an example: "
            "tidemill init my-dags --template dags"
        )
    return folder.resolve()


def choose_url(settings: Settings, folder: Path) -> str:
    """Return the URL of the store of a folder of DAGs: `store.url`, else a SQLite file beside the folder."""
    return settings.store.url or f"sqlite:///{folder.parent / DEFAULT_NAME}"
