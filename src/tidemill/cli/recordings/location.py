"""Finds the folder of a configuration's recordings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.sections.debug_settings import DebugSettings
    from tidemill.config.settings import Settings


def load_quietly(config: Path | None) -> Settings:
    """Return a configuration; from now on, only warnings and errors are logged.

    Raises:
        ConfigError: The configuration is invalid.
    """
    from tidemill.config.loading import load_settings
    from tidemill.runtime.log.setup import configure

    settings = load_settings(config)
    if settings.logging.level in ("DEBUG", "INFO"):
        settings.logging.level = "WARNING"  # lower levels are meant for the pipeline
    configure(settings.logging)
    return settings


def expand_folder(debug: DebugSettings) -> Path:
    """Return the folder of recordings.

    Raises:
        ConfigError: No folder is configured, or it cannot be resolved.
    """
    if not debug.db_dir:
        raise ConfigError(
            "debug.db_dir is '', so recordings are in the memory of their process; use tidemill trace or the web UI of "
            "that process"
        )
    try:
        return Path(debug.db_dir).expanduser()
    except RuntimeError as error:  # a user without a home directory
        raise ConfigError(f"debug.db_dir {debug.db_dir!r}: {error}; write an absolute path") from None


def find_folder(config: Path | None) -> Path:
    """Return the folder of a configuration's recordings.

    Raises:
        ConfigError: The configuration is invalid, or has no folder.
    """
    return expand_folder(load_quietly(config).debug)
