"""The remaining log size of a try; a try that is deferred consists of several attempts.

Parts of a try that ran before a restart of this worker, or on another worker, are not counted.

Invariants: every attempt may write a minimum, so that its end is always logged; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from tidemill.config.known_secrets import KnownSecrets
from tidemill.services.worker.logs.logs import AttemptLog

#: The minimum that every attempt may write.
LEAST_BYTES = 16 * 1024
_MAX_TRIES = 20_000


class LogBudget:
    """Counts what tries have written.

    Args:
        max_bytes: The log size limit of a try.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._written: OrderedDict[tuple[int, int], int] = OrderedDict()

    def open_log(self, task: int, try_number: int, epoch: int, secrets: KnownSecrets) -> AttemptLog:
        """Return the log of a new attempt, limited to the remaining size of its try."""
        left = self._max_bytes - self._written.get((task, try_number), 0)
        return AttemptLog(task, try_number, epoch, max(left, min(LEAST_BYTES, self._max_bytes)), secrets)

    def note_finished(self, log: AttemptLog) -> None:
        """Count the bytes that an attempt has written."""
        self._written[log.name] = self._written.pop(log.name, 0) + log.kept_bytes
        if len(self._written) > _MAX_TRIES:
            self._written.popitem(last=False)
