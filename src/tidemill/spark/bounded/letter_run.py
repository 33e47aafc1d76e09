"""The driver's side of dead letters in files: one id per run, and the check that all hosts share their folder.

Without `dlq.path` nothing here does anything. Invariants: a run's id is in the names of its files, so two runs never
meet; what killed engines left unfinished is removed when the run ends, or when the next one begins in its folder.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.deadletters.files import (
    check_letters_folder,
    ensure_outcomes_id,
    read_outcomes_id,
    remove_run,
    remove_unfinished,
)
from tidemill.spark.bounded.task import ChunkResult
from tidemill.spark.engine.process import EngineJob


class LetterRun:
    """The letters of one run.

    Args:
        path: `dlq.path`.
        outcomes: The folder of the outcomes.
    """

    def __init__(self, path: str, outcomes: Path) -> None:
        """Name the run, and the folder of its outcomes if it has no name yet."""
        self._path = path
        self._run = uuid.uuid4().hex
        self._outcomes_id = ensure_outcomes_id(outcomes, self._run) if path else ""
        self.tidy()

    def of(self, job: EngineJob) -> EngineJob:
        """Return a job that knows where its letters belong."""
        return msgspec.structs.replace(job, run=self._run, outcomes_id=self._outcomes_id)

    def check(self, results: Sequence[ChunkResult]) -> None:
        """Refuse a run whose letters are not where this process looks for them.

        Raises:
            ConfigError: Files are missing.
        """
        names = [name for result in results for name in result.letters]
        missing = [name for name in names if not (Path(self._path) / name).exists()]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(names)} files of dead letters are not in {self._path}: engines on other hosts "
                "wrote them there; set dlq.path to a folder on storage that all hosts share"
            )

    def tidy(self) -> None:
        """Remove what killed engines left; none may run now."""
        if self._path:
            remove_unfinished(self._path, self._outcomes_id)


@contextlib.contextmanager
def letter_run(settings: Settings, outcomes: Path) -> Iterator[LetterRun]:
    """Provide the letters of one run for a block.

    Args:
        settings: With full paths.
        outcomes: The folder of the outcomes, which exists.
    """
    run = LetterRun(settings.dlq.path, outcomes)
    try:
        yield run
    finally:
        run.tidy()


def check_letters(settings: Settings) -> None:
    """Make sure, before Spark starts, that letters can be written.

    Raises:
        ConfigError: They cannot be written.
    """
    if settings.dlq.path:
        check_letters_folder(Path(settings.dlq.path))


def forget_letters(settings: Settings, outcomes: Path) -> None:
    """Remove the letters of outcomes that are about to be removed because their messages are all processed again."""
    run = read_outcomes_id(outcomes) if settings.dlq.path else None
    if run is not None:
        remove_run(settings.dlq.path, run)
        remove_unfinished(settings.dlq.path, run)
