"""Fires for files of a folder: first for those that are there, then for new ones; triggers of one folder share a watch.

Each trigger lists the existing files itself, so that one that starts later, or is slow, gets all of them.

Invariants: no file is missed between the existing and the new ones; no version of a file is fired twice.
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
    """Fires for every file of a folder, once it is complete, and again when it has changed.

    What is fired holds `path`, `name` (the path within the folder), `size_bytes` and `modified_ns`. Its identity is
    name, size, time and inode, so that a version of a file is stored once per trigger, although all files are
    listed again after a restart.

    Args:
        path: The folder.
        pattern: Which names, as a shell would match them; `*` also matches `/`, but not names that begin with a dot.
        recursive: Whether subfolders are included.
        settle_seconds: How long a file has to be unchanged to count as complete; 0 if all files are moved there.
        rescan_seconds: How often the whole folder is scanned, whatever the operating system reports.
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
                f"pattern {pattern!r} matches no file: it is compared with the path of each file within {path}"
                f"{'' if recursive else ', which has no / unless recursive is true'}; give one such as *.csv"
            )
        self._pattern = pattern
        self._settings = DirectorySettings(os.fspath(path), recursive, settle_seconds, rescan_seconds, missing)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of this trigger."""
        settings = {name: getattr(self._settings, name) for name in DirectorySettings.__slots__}
        return "tidemill.triggers.builtin.directory.DirectoryTrigger", {**settings, "pattern": self._pattern}

    def shared_stream_key(self) -> Hashable:
        """Return the folder, and how it is watched."""
        return ("directory", self._settings)

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[FoundFile | Looked]:
        """Watch the folder."""
        return directory_stream(DirectorySettings(**{name: kwargs[name] for name in DirectorySettings.__slots__}))

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[FoundFile | Looked]
    ) -> AsyncIterator[TriggerEvent]:
        """Fire for existing files, then for new ones."""
        # Files that were fired and that the stream may still yield.
        fired: dict[str, Version] = {}
        async for event in self._fire_existing(fired):
            yield event
        listed_at = seen_at = math.inf
        async for found in shared_stream:
            if listed_at == math.inf:
                # The stream may have begun after that scan: from now on it misses nothing.
                async for event in self._fire_existing(fired):
                    yield event
                listed_at = asyncio.get_running_loop().time()
            if isinstance(found, FoundFile):
                if fired.get(found.path) != found.version and self._is_wanted(found.path):
                    yield self._build_event(found.path, found.version)
            elif found.at > seen_at + self._settings.settle_seconds:
                # Everything that existed then, the stream has yielded, if it yields it at all.
                fired.clear()
            elif found.at > listed_at:
                seen_at = min(seen_at, found.at)

    async def _fire_existing(self, fired: dict[str, Version]) -> AsyncIterator[TriggerEvent]:
        """Fire for existing files that were not fired yet."""
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
            self.log.warning("the name of a file is not valid text, so it cannot be fired", path=repr(path))
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
