"""Finds the default program of tasks."""

from __future__ import annotations

import shutil

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.core.errors import ConfigError


def find_program(settings: ExecutorSettings) -> str:
    """Return the path of `executor.binary_path` on this host.

    Raises:
        ConfigError: The program does not exist, or is not executable.
    """
    found = shutil.which(settings.binary_path, path=settings.env.get("PATH"))
    if found is None:
        raise ConfigError(
            f"no executable program {settings.binary_path!r} was found; install it or change executor.binary_path"
        )
    return found
