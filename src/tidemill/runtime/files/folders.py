"""Folders of this user: a cache for files that can be created again, and temporary folders that end with their owners.

Invariants: a folder at a location for all users is used only if it belongs to this user. A temporary folder is removed
by another process only if its lock is free; the kernel frees the lock when the owner ends for any reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.lock import HeldError, lock_file, refuse_foreign

_OWNER = ".owner"
#: A folder that is not locked by this age never will be.
_YOUNG_SECONDS = 60.0


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for files that can be created again: `$XDG_CACHE_HOME/tidemill`, or a default."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "tidemill"
    try:
        return Path.home() / ".cache" / "tidemill"
    except RuntimeError:  # a user without a home, as in some containers
        return _temporary_cache_folder()


def writable_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `user_cache_folder`, created if it is missing; a temporary one if it is not writable."""
    wanted = user_cache_folder(environ)
    if _can_write(wanted):
        return wanted
    temporary = _temporary_cache_folder()
    if _can_write(temporary):
        with contextlib.suppress(PermissionError):
            refuse_foreign(temporary)
            return temporary
    return Path(tempfile.mkdtemp(prefix="tidemill-cache-"))


def create_folder(folder: Path) -> None:
    """Create a folder that a user named, and its parents, if it is missing.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is a file, not a folder; choose another folder") from None
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be created: {error.strerror}; choose another one") from None


def _temporary_cache_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"tidemill-cache-{os.getuid()}"


def _can_write(folder: Path) -> bool:
    """Return whether files can be created in a folder, by trying."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class OwnedFolder:
    """A temporary folder of this process; creating it removes abandoned ones of the same kind.

    Args:
        prefix: The prefix of the names of its kind.
        root: The folder in which it is created; None: that of temporary files.

    Example:
        >>> folder = OwnedFolder("tidemill-example-")
        >>> folder.cleanup()
        >>> folder.path.exists()
        False
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        """Create and lock the folder."""
        root = root or Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _remove_without_owner(left)
        while True:
            self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True)
            self.path = Path(self._folder.name)
            # Before the folder is locked, another process may consider it abandoned, and remove it.
            with contextlib.suppress(HeldError, FileNotFoundError):
                self._lock = lock_file(self.path / _OWNER)
                if os.fstat(self._lock).st_nlink:
                    return
                os.close(self._lock)
            self._folder.cleanup()

    @property
    def lock(self) -> int:
        """The descriptor that holds the lock; a process that inherits it owns the folder, too, until it ends."""
        return self._lock

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_without_owner(folder: Path) -> None:
    status = folder.lstat()
    if status.st_uid != os.getuid() or folder.is_symlink():
        return
    if not (folder / _OWNER).exists():
        if time.time() - status.st_mtime > _YOUNG_SECONDS:
            folder.rmdir()  # fails if the folder is not empty, because it may not be ours
        return
    try:
        lock = lock_file(folder / _OWNER)
    except HeldError:
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
