"""How much of the log of a try is still kept: a try that is deferred consists of several attempts.

What a worker has not seen itself, because it was started again or another one had the try, is not counted.
Invariants: every attempt may write a little, so that its end can always be read; what is remembered is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from tidemill.config.known_secrets import KnownSecrets
from tidemill.services.worker.logs import AttemptLog

#: What an attempt may write at least.
LEAST_BYTES = 16 * 1024
_MAX_TRIES = 20_000


class LogBudget:
    """What tries have written.

    Args:
        max_bytes: How much of the log of a try is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        """Know no try yet."""
        self._max_bytes = max_bytes
        self._written: OrderedDict[tuple[int, int], int] = OrderedDict()

    def open_log(self, task: int, try_number: int, epoch: int, secrets: KnownSecrets) -> AttemptLog:
        """Return the log of a new attempt, with what is left for its try."""
        left = self._max_bytes - self._written.get((task, try_number), 0)
        return AttemptLog(task, try_number, epoch, max(left, min(LEAST_BYTES, self._max_bytes)), secrets)

    def note_finished(self, log: AttemptLog) -> None:
        """Count what an attempt has written."""
        self._written[log.name] = self._written.pop(log.name, 0) + log.kept_bytes
        if len(self._written) > _MAX_TRIES:
            self._written.popitem(last=False)
