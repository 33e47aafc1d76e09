"""What is recorded of an engine: everything, or only what failed, as of a bounded run.

A bounded run has outcomes, one row per message: of what went well, they are the record.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.pipeline.reports.report import HistoryStatus
from tidemill.recorder.events import EventKind


@dataclass(frozen=True, slots=True)
class RecordChoice:
    """What is recorded.

    Attributes:
        statuses: The messages; those with a dead letter are recorded in any case.
        kinds: The events.
        successes: Whether tasks and periodic hooks that ended well are recorded, and commits; and slow ones are logged.
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
