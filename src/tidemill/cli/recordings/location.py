"""Where the recordings of a configuration are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.debug_settings import DebugSettings
    from tidemill.config.settings import Settings


def load_quietly(config: Path | None) -> Settings:
    """Return a configuration; what is logged from now on are warnings and worse.

    Raises:
        ConfigError: It is wrong.
    """
    from tidemill.config.loading import load_settings
    from tidemill.runtime.log.setup import configure

    settings = load_settings(config)
    if settings.logging.level in ("DEBUG", "INFO"):
        settings.logging.level = "WARNING"  # meant for the pipeline
    configure(settings.logging)
    return settings


def expand_folder(debug: DebugSettings) -> Path:
    """Return the folder of recordings.

    Raises:
        ConfigError: There is none.
    """
    if not debug.db_dir:
        raise ConfigError(
            "debug.db_dir is '': recordings are in the memory of their process; tidemill trace asks it, and its web UI "
            "shows them"
        )
    try:
        return Path(debug.db_dir).expanduser()
    except RuntimeError as error:  # a user without a home
        raise ConfigError(f"debug.db_dir {debug.db_dir!r}: {error}; write the whole path") from None


def find_folder(config: Path | None) -> Path:
    """Return the folder of a configuration's recordings.

    Raises:
        ConfigError: It has none, or the configuration is wrong.
    """
    return expand_folder(load_quietly(config).debug)
