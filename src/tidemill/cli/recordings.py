"""Where the recordings of a configuration are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.debug_settings import DebugSettings
    from tidemill.recorder.reader import Reader


def find_folder(config: Path | None) -> tuple[Path, DebugSettings]:
    """Return the folder of a configuration's recordings.

    Raises:
        ConfigError: It has none, or the configuration is wrong.
    """
    from tidemill.config.loading import load_settings
    from tidemill.runtime.log import configure

    settings = load_settings(config)
    if settings.logging.level in ("DEBUG", "INFO"):
        settings.logging.level = "WARNING"  # meant for the pipeline
    configure(settings.logging)
    if not settings.debug.db_dir:
        raise ConfigError(
            "debug.db_dir is '': recordings are in the memory of their process; only its web UI shows them"
        )
    try:
        return Path(settings.debug.db_dir).expanduser(), settings.debug
    except RuntimeError as error:  # a user without a home
        raise ConfigError(f"debug.db_dir {settings.debug.db_dir!r}: {error}; write the whole path") from None


def open_reader(config: Path | None) -> tuple[Reader, str]:
    """Return a reader of a configuration's recordings, and where they are.

    Raises:
        ConfigError: It has none, or the configuration is wrong.
    """
    from tidemill.recorder.reader import Reader

    folder, _ = find_folder(config)
    return Reader(folder), str(folder)
