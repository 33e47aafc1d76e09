"""Files that settle: which files of a folder are new, and complete as far as one can tell from outside.

What is seen of the folder comes in, from a look at all of it or at single files; a file is told once it has not changed
for so long. A file that changes after it was told is told again, as a new version.

Invariants:
1. A version of a file is told at most once as long as the file is there.
2. A file is told only when it was seen unchanged for `settle_seconds`.
3. What was told first was complete first; at the same time, the older version is first, then the smaller name.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Version(NamedTuple):
    """What tells one state of a file from another; ordered by age.

    Attributes:
        modified_ns: Nanoseconds since the epoch.
        size_bytes: How large it is.
        inode: Which file of the file system the name stands for.
    """

    modified_ns: int
    size_bytes: int
    inode: int


@dataclass(slots=True)
class _Seen:
    version: Version
    since: float
    told: bool = False


@dataclass(slots=True)
class StableFiles:
    """What is known of a folder.

    Args:
        settle_seconds: How long a file may not have changed before it is told.
    """

    settle_seconds: float
    _seen: dict[str, _Seen] = field(default_factory=dict)
    #: (when, version, path), outdated ones included.
    _due: list[tuple[float, Version, str]] = field(default_factory=list)

    def see(self, path: str, version: Version | None, now: float) -> None:
        """Take how a file was found; None: it was not there."""
        seen = self._seen.get(path)
        if version is None:
            self._seen.pop(path, None)
        elif seen is None or seen.version != version:
            self._seen[path] = _Seen(version, now)
            heapq.heappush(self._due, (now + self.settle_seconds, version, path))

    def know_all(self, files: Mapping[str, Version], now: float) -> None:
        """Take what is there already: none of it is told before it changes."""
        for path, version in files.items():
            self._seen[path] = _Seen(version, now, told=True)

    def see_all(self, files: Mapping[str, Version], now: float) -> None:
        """Take all that there is; what is not in it is not there."""
        for path in [path for path in self._seen if path not in files]:
            del self._seen[path]
        for path, version in files.items():
            self.see(path, version, now)

    def due(self) -> float | None:
        """Return when the next file may have settled; None: none will."""
        return self._due[0][0] if self._due else None

    def candidates(self, now: float) -> list[str]:
        """Return the files that are about to be told: look at them once more (`see`), then `take`."""
        return [path for when, version, path in self._due if when <= now and self._is_current(when, version, path)]

    def take(self, now: float) -> list[tuple[str, Version]]:
        """Return the files that have settled, and know them as told."""
        settled = []
        while self._due and self._due[0][0] <= now:
            when, version, path = heapq.heappop(self._due)
            if self._is_current(when, version, path):
                self._seen[path].told = True
                settled.append((path, version))
        return settled

    def _is_current(self, when: float, version: Version, path: str) -> bool:
        seen = self._seen.get(path)
        if seen is None or seen.told or seen.version != version:
            return False
        return seen.since + self.settle_seconds == when
