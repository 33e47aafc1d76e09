"""The scope of a recording: everything, or only failures, as in a bounded run.

The outcomes of a bounded run already have a row for each message that succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.pipeline.reports.report import HistoryStatus
from tidemill.recorder.format.events import EventKind


@dataclass(frozen=True, slots=True)
class RecordChoice:
    """The scope of a recording.

    Attributes:
        statuses: The statuses of recorded messages; messages with a dead letter are always recorded.
        kinds: The kinds of recorded events.
        successes: Whether successful tasks and periodic hooks and commits are recorded, and slow tasks logged.
    """

    statuses: frozenset[HistoryStatus]
    kinds: frozenset[EventKind]
    successes: bool


EVERYTHING = RecordChoice(frozenset(HistoryStatus), frozenset(EventKind), successes=True)
#: The parts of a bounded run are not owned, paused or committed as partitions are.
FAILURES = RecordChoice(
    frozenset({HistoryStatus.FAILED, HistoryStatus.REJECTED}),
    frozenset(EventKind) - {EventKind.ASSIGNED, EventKind.REVOKED, EventKind.PAUSED, EventKind.RESUMED},
    successes=False,
)
