"""The driver's side of dead letters in files: one id per run, and a check that all hosts share the folder.

Without `dlq.path`, this module does nothing. Invariants: the names of a run's files contain its id, so two runs never
collide; files that killed engines left unfinished are removed when the run ends, or when the next run starts in the
same folder.
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
    """The dead letters of one run.

    Args:
        path: The folder of the letters, `dlq.path`.
        outcomes: The folder of the outcomes.
    """

    def __init__(self, path: str, outcomes: Path) -> None:
        """Choose an id for the run, and one for the folder of outcomes if it has none yet."""
        self._path = path
        self._run = uuid.uuid4().hex
        self._outcomes_id = ensure_outcomes_id(outcomes, self._run) if path else ""
        self.tidy()

    def of(self, job: EngineJob) -> EngineJob:
        """Return a copy of a job that carries the ids for its letters."""
        return msgspec.structs.replace(job, run=self._run, outcomes_id=self._outcomes_id)

    def check(self, results: Sequence[ChunkResult]) -> None:
        """Check that the letters of the run are in this process's folder.

        Raises:
            ConfigError: Files are missing.
        """
        names = [name for result in results for name in result.letters]
        missing = [name for name in names if not (Path(self._path) / name).exists()]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(names)} dead-letter files are not in {self._path}: engines on other hosts "
                "wrote them locally; set dlq.path to a folder on storage that all hosts share"
            )

    def tidy(self) -> None:
        """Remove files that killed engines left unfinished; no engine may be running."""
        if self._path:
            remove_unfinished(self._path, self._outcomes_id)


@contextlib.contextmanager
def letter_run(settings: Settings, outcomes: Path) -> Iterator[LetterRun]:
    """Provide the letters of one run for a block.

    Args:
        settings: The settings, with full paths.
        outcomes: The folder of the outcomes, which exists.
    """
    run = LetterRun(settings.dlq.path, outcomes)
    try:
        yield run
    finally:
        run.tidy()


def check_letters(settings: Settings) -> None:
    """Check, before Spark starts, that letters can be written.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    if settings.dlq.path:
        check_letters_folder(Path(settings.dlq.path))


def forget_letters(settings: Settings, outcomes: Path) -> None:
    """Remove the letters of outcomes that are about to be discarded because all their messages are processed again."""
    run = read_outcomes_id(outcomes) if settings.dlq.path else None
    if run is not None:
        remove_run(settings.dlq.path, run)
        remove_unfinished(settings.dlq.path, run)
