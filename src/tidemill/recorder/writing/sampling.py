"""Samples for a recording: the configuration once, the state at intervals, and counts each second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.recorder.format.counts import Counts, CountSampler
from tidemill.recorder.format.events_database import EventsDatabase
from tidemill.runtime.link.progress import EngineProgress

_MINUTE = 60


#: Returns the counts since the last call and the current state; None while nothing is known yet. The arguments are the
#: seconds since the epoch, and whether this is the last call.
Sample = Callable[[int, bool], tuple[Counts, object] | None]


def sample_progress(read_progress: Callable[[], EngineProgress | None]) -> Sample:
    """Return a `Sample` of the sums over all engines."""
    sampler = CountSampler()

    def sample(at: int, last: bool) -> tuple[Counts, object] | None:
        progress = read_progress()
        return None if progress is None else (sampler.take(progress, at, last=last), progress)

    return sample


class ProcessSampler:
    """Stores samples of the running engines once a second.

    Args:
        settings: The section `debug`.
        sample: Returns counts and state; None: nothing is sampled.
    """

    def __init__(self, settings: DebugSettings, sample: Sample | None) -> None:
        self._settings = settings
        self._sample = sample
        self._config: dict[str, Any] | None = None
        self._database: EventsDatabase | None = None
        self._minute: Counts | None = None
        self._next = self._next_state = 0.0

    def begin(self, database: EventsDatabase, config: dict[str, Any] | None) -> None:
        """Store the configuration, now and in each later database."""
        self._config = config if self._settings.store_config else None
        self._enter(database)

    def _enter(self, database: EventsDatabase) -> None:
        self._database = database
        self._next_state = 0.0
        self._minute = None  # the previous database has the counts of its own seconds
        if self._config is not None:
            database.add_config(time.time_ns() // 1000, _encode(self._config))

    def tick(self, database: EventsDatabase) -> None:
        """Store the samples that are due.

        Args:
            database: The current database.

        Raises:
            sqlite3.Error: The database cannot be written.
        """
        if database is not self._database:
            self._enter(database)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1.0
            self._look(database, now)

    def end(self, database: EventsDatabase) -> None:
        """Store the counts since the last sample, and the final state.

        Raises:
            sqlite3.Error: The database cannot be written.
        """
        self._next_state = 0.0
        self._look(database, time.monotonic(), last=True)

    def _look(self, database: EventsDatabase, now: float, *, last: bool = False) -> None:
        if self._sample is None or not self._settings.store_state:
            return
        found = self._sample(int(time.time()), last)
        if found is None:
            return
        counts, state = found
        self._store_counts(database, counts)
        if now >= self._next_state:
            self._next_state = now + self._settings.state_sync_interval_seconds
            database.add_state(time.time_ns() // 1000, _encode(_mask(msgspec.to_builtins(state))))

    def _store_counts(self, database: EventsDatabase, counts: Counts) -> None:
        if counts != Counts(counts.at, lag=counts.lag, attempt_counts=[0] * len(counts.attempt_counts)):
            database.add_counts(1, counts.at, msgspec.msgpack.encode(counts))
        minute = counts.at // _MINUTE * _MINUTE
        if self._minute is None or self._minute.at != minute:
            if self._minute is not None:
                database.add_counts(_MINUTE, self._minute.at, msgspec.msgpack.encode(self._minute))
            self._minute = Counts(minute, _MINUTE)
        self._minute.add(counts)


def _mask(value: Any) -> Any:
    """Mask secrets in all texts of a value. Keys stay: they are names of topics and the like."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {key: _mask(item) for key, item in value.items()}
    return [_mask(item) for item in value] if isinstance(value, list) else value


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
