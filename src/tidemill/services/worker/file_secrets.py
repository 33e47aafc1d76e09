"""The secrets that the tasks of each DAG file were given; they are masked in all texts of that file's tasks.

A process may still hold the secrets of an earlier attempt, in a module or in memory inherited from its template.
Secrets therefore belong to the file, and are kept as long as the worker runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.tasks.endings import Failure
from tidemill.core.wording import shorten

#: Longer errors are cut; the log has the whole error.
MAX_ERROR = 8_000


class FileSecrets:
    """The secrets of all files of a worker.

    Args:
        process: Collects all of them, for masking in the log of the worker itself.
    """

    def __init__(self, process: KnownSecrets) -> None:
        self._process = process
        self._files: dict[str, KnownSecrets] = {}

    def find(self, file: str) -> KnownSecrets:
        """Return the secrets of a file."""
        if (known := self._files.get(file)) is None:
            known = self._files[file] = KnownSecrets()
        return known

    def add(self, file: str, secrets: Iterable[str]) -> None:
        """Add secrets that a task of a file was given."""
        if secrets := tuple(secrets):
            self.find(file).add(secrets)
            self._process.add(secrets)

    def mask_failure(self, file: str, failure: Failure) -> Failure:
        """Return a failure with the secrets of its file masked."""
        known = self.find(file)
        # Mask only known secrets: masking text that merely looks like one would break the origin's JSON.
        origin = None if failure.origin is None else known.mask_known(failure.origin)
        return dataclasses.replace(failure, error=shorten(known.mask(failure.error), MAX_ERROR), origin=origin)
