"""Finds configured folders that a pipeline could not write to; creates nothing but an unnamed temporary file.

Folders of a cluster's engines are on other machines, so they are checked only if the engines run on this one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError


class CheckedFolder(msgspec.Struct, frozen=True):
    """A folder in the configuration.

    Attributes:
        setting: The setting that names it.
        path: The value of the setting.
        note: A note for the finding.
    """

    setting: str
    path: str
    note: str = ""


def list_folders(settings: Settings) -> Iterator[CheckedFolder]:
    """Yield the folders that a pipeline with these settings writes to on this machine."""
    from tidemill.spark.session.conf import is_local

    if settings.dlq.path:
        yield CheckedFolder("dlq.path", settings.dlq.path, " (bounded runs only)")
    if not is_local(settings.spark):
        return
    for name, section in settings.sinks.filesystem.items():
        yield CheckedFolder(f"sinks.filesystem.{name}.base_path", section.base_path)
    if settings.history.path:
        yield CheckedFolder("history.path", settings.history.path)
    if settings.cache.enabled:
        yield CheckedFolder("cache.path", settings.cache.path)


def check_folder(folder: CheckedFolder) -> str:
    """Check that a folder can be written to or created.

    Raises:
        ConfigError: The path or one of its parents is not a folder.
        RemoteError: The folder cannot be written to.
    """
    base = Path(folder.path).absolute()
    existing = base
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # the name is too long, or a parent folder denies access
        raise ConfigError(f"{base} cannot be used: {error.strerror}; change {folder.setting}") from None
    if not existing.is_dir():
        raise ConfigError(f"{existing} is a file, not a folder; remove it or change {folder.setting}")
    if base == existing:
        try:
            # Only an attempt is conclusive: read-only file systems and full disks may have writable modes.
            with tempfile.TemporaryFile(dir=base) as file:
                file.write(b"x")
                file.flush()
        except OSError as error:
            raise RemoteError(
                f"{base} cannot be written to: {error.strerror}; change its permissions or {folder.setting}"
            ) from None
        return f"{base}{folder.note}"
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RemoteError(
            f"{base} cannot be created, because {existing} cannot be written to; change its permissions or "
            f"{folder.setting}"
        )
    return f"{base}, will be created at startup{folder.note}"


def find_recording_problem(settings: Settings) -> str:
    """Return the reason why recordings would be stored in memory although a folder is set; '' if there is none.

    The pipeline runs anyway, so this is a warning and not a rejection.
    """
    debug = settings.debug
    if not debug.enabled or not debug.db_dir:
        return ""
    try:
        folder = Path(debug.db_dir).expanduser()
        check_folder(CheckedFolder("debug.db_dir", str(folder)))
    except RuntimeError:
        why = f"{debug.db_dir}: this user has no home directory; set debug.db_dir to an absolute path"
    except (ConfigError, RemoteError) as error:
        why = str(error)
    else:
        return ""
    return f"{why}; until then, only the newest 64 MiB of recordings are stored, in memory"
