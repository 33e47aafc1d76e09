"""Fires for the files of a folder: first the existing ones, then new ones. Triggers on one folder share a watch.

Each trigger lists the existing files itself, so a trigger that starts later or is slow still sees all of them.

Invariants: no file is missed between the existing and the new ones; no version of a file fires twice.
"""

from __future__ import annotations

import asyncio
import fnmatch
import math
import os
from collections.abc import AsyncIterator, Hashable
from pathlib import Path
from typing import Any, Literal

from tidemill.core.triggers.stable_files import Version
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import check_path
from tidemill.triggers.builtin.identities import build_file_identity
from tidemill.triggers.builtin.isolated import run_alone
from tidemill.triggers.producers.directory import DirectorySettings, FoundFile, Looked, directory_stream, look_twice


class DirectoryTrigger(BaseEventTrigger):
    """Fires for every complete file of a folder, and again whenever a file has changed.

    The payload has `path`, `name` (the path within the folder), `size_bytes` and `modified_ns`. The identity is name,
    size, modification time and inode, so each version of a file is stored once per trigger, although all files are
    listed again after a restart.

    Args:
        path: The folder.
        pattern: A shell pattern for names; `*` also matches `/`, but not names that start with a dot.
        recursive: Whether to include subfolders.
        settle_seconds: How long a file must be unchanged to count as complete; 0 if all files are moved into the
            folder.
        rescan_seconds: The interval of full scans, regardless of the notifications of the operating system.
        missing: What to do if the folder does not exist: `fail`, or `wait` for it.

    Raises:
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str = "*",
        recursive: bool = False,
        settle_seconds: float = 1.0,
        rescan_seconds: float = 10.0,
        missing: Literal["fail", "wait"] = "fail",
    ) -> None:
        super().__init__()
        check_path(os.fspath(path), "the folder to watch")
        if not pattern or pattern.startswith("/") or ("/" in pattern and not recursive):
            raise ValueError(
                f"pattern {pattern!r} can never match: it is compared with the path of each file within {path}"
                f"{'' if recursive else ', which has no / unless recursive is true'}; use a pattern such as *.csv"
            )
        self._pattern = pattern
        self._settings = DirectorySettings(os.fspath(path), recursive, settle_seconds, rescan_seconds, missing)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        settings = {name: getattr(self._settings, name) for name in DirectorySettings.__slots__}
        return "tidemill.triggers.builtin.directory.DirectoryTrigger", {**settings, "pattern": self._pattern}

    def shared_stream_key(self) -> Hashable:
        """Return the folder and the settings of its watch."""
        return ("directory", self._settings)

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[FoundFile | Looked]:
        """Watch the folder."""
        return directory_stream(DirectorySettings(**{name: kwargs[name] for name in DirectorySettings.__slots__}))

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[FoundFile | Looked]
    ) -> AsyncIterator[TriggerEvent]:
        """Fire for existing files, then for new ones."""
        # Versions that this trigger has fired itself and that the stream may still yield.
        fired: dict[str, Version] = {}
        async for event in self._fire_existing(fired):
            yield event
        listed_at = seen_at = math.inf
        async for found in shared_stream:
            if listed_at == math.inf:
                # The stream may have started after the first scan; from here on it misses nothing.
                async for event in self._fire_existing(fired):
                    yield event
                listed_at = asyncio.get_running_loop().time()
            if isinstance(found, FoundFile):
                if fired.get(found.path) != found.version and self._is_wanted(found.path):
                    yield self._build_event(found.path, found.version)
            elif found.at > seen_at + self._settings.settle_seconds:
                # The stream has now yielded every version in `fired` that it will ever yield.
                fired.clear()
            elif found.at > listed_at:
                seen_at = min(seen_at, found.at)

    async def _fire_existing(self, fired: dict[str, Version]) -> AsyncIterator[TriggerEvent]:
        """Fire for existing files that have not been fired yet."""
        for path, version in await look_twice(self._settings):
            if fired.get(path) != version and self._is_wanted(path):
                fired[path] = version
                yield self._build_event(path, version)

    def _is_wanted(self, path: str) -> bool:
        if not fnmatch.fnmatchcase(path, self._pattern):
            return False
        if _is_hidden(path) and not _is_hidden(self._pattern):
            return False
        try:
            path.encode()
        except UnicodeEncodeError:
            self.log.warning("skipped a file because its name is not valid Unicode; rename it", path=repr(path))
            return False
        return True

    def _build_event(self, path: str, version: Version) -> TriggerEvent:
        payload = {
            "path": str(Path(self._settings.path, path)),
            "name": path,
            "size_bytes": version.size_bytes,
            "modified_ns": version.modified_ns,
        }
        return TriggerEvent(payload, identity=build_file_identity(path, version))

    def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire without sharing the watch."""
        return run_alone(self)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))
