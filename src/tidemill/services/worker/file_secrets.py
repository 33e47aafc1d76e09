"""What the tasks of each DAG file were given: it is masked in all texts of the tasks of that file.

A process may hold what an earlier attempt was given, in a module or in what it was forked from; so secrets belong to
the file, and are kept as long as the worker runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.wording import shorten
from tidemill.store.calls.worker_calls import Failure

#: A longer error is cut; the log has all of it.
MAX_ERROR = 8_000


class FileSecrets:
    """The secrets of all files of a worker.

    Args:
        process: Gets all of them, for the log of the worker itself.
    """

    def __init__(self, process: KnownSecrets) -> None:
        self._process = process
        self._files: dict[str, KnownSecrets] = {}

    def find(self, file: str) -> KnownSecrets:
        """Return those of a file."""
        if (known := self._files.get(file)) is None:
            known = self._files[file] = KnownSecrets()
        return known

    def add(self, file: str, secrets: Iterable[str]) -> None:
        """Note what a task of a file was given."""
        if secrets := tuple(secrets):
            self.find(file).add(secrets)
            self._process.add(secrets)

    def mask_failure(self, file: str, failure: Failure) -> Failure:
        """Return a failure with everything masked that it says."""
        known = self.find(file)
        # A form that only looks like a secret would break the JSON of the origin.
        origin = None if failure.origin is None else known.mask_known(failure.origin)
        return msgspec.structs.replace(failure, error=shorten(known.mask(failure.error), MAX_ERROR), origin=origin)
