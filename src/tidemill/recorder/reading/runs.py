"""The runs whose recordings are below a folder: one per worker of a group, live or ended.

Their names come from the databases; folder names are derived from these and may have lost characters.
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
    """Selects runs; None matches all."""

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
    """A `RunChoice` by values."""

    recording: str | None = None
    group: str | None = None
    worker: str | None = None


class StoredRun(msgspec.Struct, frozen=True):
    """The recordings of a worker.

    Attributes:
        recording: The name of the worker's folder.
        group: The consumer group.
        worker: The worker's name.
        started_us: The start of its newest period.
        written_us: The time of the last write.
        live: Whether a process writes to it.
        periods: The number of its periods.
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
    """The names that identify a recording.

    Attributes:
        group: The consumer group.
        worker: The worker's name.
        bounded: Whether it is of bounded runs.
    """

    group: str
    worker: str
    bounded: bool = False


class RunNames:
    """Caches the names of recordings, which never change."""

    def __init__(self) -> None:
        self._known: RecentlyUsed[str, RunName] = RecentlyUsed(_MAX_NAMES)

    def find(self, store: SegmentStore) -> RunName:
        """Return the name; if the database cannot be read, the folder's name stands for the group."""
        try:
            return self._known.find(store.recording, lambda: _read_names(store))
        except LookupError:  # not cached, because the database may be readable a moment later
            return RunName(store.recording, "")

    def choose(self, stores: Iterable[SegmentStore], choice: RunChoice) -> list[SegmentStore]:
        """Return the stores of the selected runs."""
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
    """Return the runs of some stores: live ones first, then the most recently written."""
    periods: dict[str, list[SegmentStore]] = {}
    for store in stores:
        periods.setdefault(store.recording, []).append(store)
    runs = [_describe(recording, own, names) for recording, own in periods.items()]
    return sorted(runs, key=lambda run: (not run.live, -run.written_us, run.recording))


def _describe(recording: str, stores: Sequence[SegmentStore], names: RunNames) -> StoredRun:
    """Return a run, given its stores, newest first."""
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
    # Two processes of the same name may write at the same time.
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
