"""Finds differences between the DAG files of a worker's folder and the stored ones, and reports them to the store.

Invariants: a file counts as missing from the claim that does not find it until it is in the folder again. The store is
told when something has changed, and again after an outage; claims do not wait for that.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from tidemill.store.calls.service_calls import ReportFiles

log = structlog.get_logger(__name__)


class OwnFiles:
    """The DAG files of a worker.

    Args:
        session: The session of the worker.
        folder: The folder of DAGs.
    """

    def __init__(self, session: int, folder: Path) -> None:
        self._session, self._folder = session, folder
        self._missing: set[str] = set()
        self._differing: set[str] = set()
        self._told = ReportFiles(session)

    @property
    def missing(self) -> tuple[str, ...]:
        """The files that the folder lacks, as far as claims have shown."""
        return tuple(sorted(self._missing))

    def lacks(self, file: str) -> bool:
        """Return whether the folder lacks a file now; if so, it counts as missing from now on."""
        if os.path.exists(os.path.join(self._folder, file)):  # noqa: PTH110, PTH118 - for each attempt
            return False
        if file not in self._missing:
            log.warning(
                "this worker lacks a DAG file; it takes no task of it until the file is in its folder",
                file=file,
                folder=str(self._folder),
            )
            self._missing.add(file)
        return True

    def note_difference(self, file: str, *, differs: bool) -> None:
        """Note whether the file that an attempt has run differs from the stored one."""
        if differs:
            self._differing.add(file)
        else:
            self._differing.discard(file)

    def look(self) -> None:
        """Look for the missing files again."""
        for file in [file for file in self._missing if (self._folder / file).exists()]:
            log.info("a DAG file that this worker lacked is in its folder now", file=file)
            self._missing.discard(file)
        self._differing -= self._missing

    def build_report(self) -> ReportFiles | None:
        """Return what the store has not been told yet; None: it knows everything."""
        report = ReportFiles(self._session, self.missing, tuple(sorted(self._differing)))
        return None if report == self._told else report

    def note_told(self, report: ReportFiles) -> None:
        """Record what the store has been told."""
        self._told = report
