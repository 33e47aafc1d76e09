"""Finds the files of a folder that are new and, as far as an observer can tell, complete.

The shell reports the state of the whole folder or of single files; a file is returned once it has been unchanged for a
given time. A file that changes after that is returned again, as a new version.

Invariants:
1. A version of a file is returned at most once while the file exists.
2. A file is returned only after it was unchanged for `settle_seconds`.
3. Files are returned in the order in which they became complete; if several do so at once, the oldest version comes
   first, then by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Version(NamedTuple):
    """Distinguishes one state of a file from another; ordered by age.

    Attributes:
        modified_ns: When the file was last modified, in nanoseconds since the epoch.
        size_bytes: Its size.
        inode: Its inode number, which changes when another file gets the name.
    """

    modified_ns: int
    size_bytes: int
    inode: int


@dataclass(slots=True)
class _Seen:
    version: Version
    since: float
    reported: bool = False


@dataclass(slots=True)
class StableFiles:
    """The state of a folder.

    Args:
        settle_seconds: How long a file has to be unchanged before it is returned.
    """

    settle_seconds: float
    _seen: dict[str, _Seen] = field(default_factory=dict)
    #: (due, version, path), including outdated entries.
    _due: list[tuple[float, Version, str]] = field(default_factory=list)

    def see(self, path: str, version: Version | None, now: float) -> None:
        """Process the version of a file; None: the file does not exist."""
        seen = self._seen.get(path)
        if version is None:
            self._seen.pop(path, None)
        elif seen is None or seen.version != version:
            self._seen[path] = _Seen(version, now)
            heapq.heappush(self._due, (now + self.settle_seconds, version, path))

    def know_all(self, files: Mapping[str, Version], now: float) -> None:
        """Record files that already exist: none of them is returned before it changes."""
        for path, version in files.items():
            self._seen[path] = _Seen(version, now, reported=True)

    def see_all(self, files: Mapping[str, Version], now: float) -> None:
        """Process a complete list of the folder's files; files that are not listed no longer exist."""
        for path in [path for path in self._seen if path not in files]:
            del self._seen[path]
        for path, version in files.items():
            self.see(path, version, now)

    @property
    def due(self) -> float | None:
        """The time at which the next file may be complete; None if no file is pending."""
        return self._due[0][0] if self._due else None

    def list_candidates(self, now: float) -> list[str]:
        """Return the files that are about to be returned. Check each once more (`see`), then call `take`."""
        return [path for when, version, path in self._due if when <= now and self._is_current(when, version, path)]

    def take(self, now: float) -> list[tuple[str, Version]]:
        """Return the files that are complete, each once."""
        settled = []
        while self._due and self._due[0][0] <= now:
            when, version, path = heapq.heappop(self._due)
            if self._is_current(when, version, path):
                self._seen[path].reported = True
                settled.append((path, version))
        return settled

    def _is_current(self, when: float, version: Version, path: str) -> bool:
        seen = self._seen.get(path)
        if seen is None or seen.reported or seen.version != version:
            return False
        return seen.since + self.settle_seconds == when
