"""Folders of this user: one for what can be downloaded or created again, and temporary ones that end with their owners.

Invariants: a folder in a place for all users is used only if it is this user's; a temporary folder is removed by
another process only if the lock in it is free, which the kernel sees to when its owner ends, however that ends.
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
from tidemill.runtime.lock import HeldError, lock_file, refuse_foreign

_OWNER = ".owner"
#: A folder that has not been locked by then never will be.
_YOUNG_SECONDS = 60.0


def user_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for what can be created again: `$XDG_CACHE_HOME/tidemill`, if it can be written."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "tidemill"
    try:
        return Path.home() / ".cache" / "tidemill"
    except RuntimeError:  # a user without a home, as in some containers
        return _temporary_cache_folder()


def writable_cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `user_cache_folder`, created if it is missing; if it cannot be written, a temporary one."""
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
    """Create a folder that a user named, and those above it, if it is missing.

    Raises:
        ConfigError: It cannot be created.
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
    """Tell whether files can be created in a folder, by trying."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


class OwnedFolder:
    """A temporary folder of this process, which removes those of the same kind that earlier ones left.

    Args:
        prefix: What the names of its kind begin with.

    Example:
        >>> folder = OwnedFolder("tidemill-example-")
        >>> folder.cleanup()
        >>> folder.path.exists()
        False
    """

    def __init__(self, prefix: str) -> None:
        """Make it."""
        root = Path(tempfile.gettempdir())
        for left in root.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _remove_without_owner(left)
        while True:
            self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            self.path = Path(self._folder.name)
            # Before it is locked, another process may take it for one that has lost its owner, and remove it.
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
        """Remove it; a second call does nothing."""
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
            folder.rmdir()  # fails if there is anything in it: it may not be ours
        return
    try:
        lock = lock_file(folder / _OWNER)
    except HeldError:
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
