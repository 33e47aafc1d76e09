"""The runs whose recordings are below a folder: one for each worker of a group, whether it runs or has ended.

What a run is called is in its databases; the names of folders are made of it, and may have lost characters.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tidemill.recorder.format.read_database import read_about
from tidemill.recorder.reading.event_search import ask_database
from tidemill.recorder.reading.segment_store import DiskStore, RecentlyUsed, SegmentStore

_MILLION = 1_000_000
_MAX_NAMES = 4096


class RunChoice(Protocol):
    """Which runs; None matches all."""

    @property
    def recording(self) -> str | None:
        """The name of the worker's folder."""

    @property
    def group(self) -> str | None:
        """The consumer group."""

    @property
    def worker(self) -> str | None:
        """The worker's name."""


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of runs."""

    recording: str | None = None
    group: str | None = None
    worker: str | None = None


class StoredRun(msgspec.Struct, frozen=True):
    """A worker's recordings.

    Attributes:
        recording: The name of its folder.
        group: The consumer group.
        worker: The worker's name.
        started_us: When its newest period was begun.
        written_us: When something was last written.
        live: Whether it is being written.
        periods: How many it has.
        bounded: Whether they are of bounded runs, which record failures only.
    """

    recording: str
    group: str
    worker: str
    started_us: int
    written_us: int
    live: bool
    periods: int
    bounded: bool = False


class RunName(msgspec.Struct, frozen=True):
    """What a recording is called.

    Attributes:
        group: The consumer group.
        worker: The worker's name.
        bounded: Whether it is of bounded runs.
    """

    group: str
    worker: str
    bounded: bool = False


class RunNames:
    """Knows what recordings are called, which never changes."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: RecentlyUsed[str, RunName] = RecentlyUsed(_MAX_NAMES)

    def find(self, store: SegmentStore) -> RunName:
        """Return the name; where the database cannot be read, its group is the name of the folder."""
        try:
            return self._known.find(store.recording, lambda: _read_names(store))
        except LookupError:  # not kept: it may be readable a moment later
            return RunName(store.recording, "")

    def choose(self, stores: Iterable[SegmentStore], choice: RunChoice) -> list[SegmentStore]:
        """Return the stores of some runs."""
        chosen = [store for store in stores if choice.recording in (None, store.recording)]
        if choice.group is None and choice.worker is None:
            return chosen
        return [
            store
            for store in chosen
            if (name := self.find(store))
            and choice.group in (None, name.group)
            and choice.worker in (None, name.worker)
        ]


def list_runs(stores: Sequence[SegmentStore], names: RunNames) -> list[StoredRun]:
    """Return the runs of some stores: those that are being written first, then the newest first."""
    periods: dict[str, list[SegmentStore]] = {}
    for store in stores:
        periods.setdefault(store.recording, []).append(store)
    runs = [_describe(recording, own, names) for recording, own in periods.items()]
    return sorted(runs, key=lambda run: (not run.live, -run.written_us, run.recording))


def _describe(recording: str, stores: Sequence[SegmentStore], names: RunNames) -> StoredRun:
    """Return a run; its stores are the newest first."""
    name = names.find(stores[0])
    started: list[int] = []

    def read(db: sqlite3.Connection) -> None:
        if (about := read_about(db)) is not None:
            started.append(about.started_us)

    ask_database(stores[0], read, [])
    first = started[0] if started else 0
    if not isinstance(stores[0], DiskStore):
        return StoredRun(recording, name.group, name.worker, first, first, live=True, periods=len(stores))
    written = first
    period = stores[0].period
    for path in (period.database, period.folder):
        with contextlib.suppress(OSError):
            written = max(written, int(path.lstat().st_mtime * _MILLION))
    # Two processes of one name may write beside each other.
    live = any(isinstance(store, DiskStore) and store.period.is_live() for store in stores[:2])
    return StoredRun(recording, name.group, name.worker, first, written, live, len(stores), name.bounded)


def _read_names(store: SegmentStore) -> RunName:
    found: list[RunName] = []

    def read(db: sqlite3.Connection) -> None:
        if (about := read_about(db)) is not None:
            found.append(RunName(about.group, about.worker, about.bounded))

    ask_database(store, read, [])
    if not found:
        raise LookupError(store.recording)
    return found[0]
