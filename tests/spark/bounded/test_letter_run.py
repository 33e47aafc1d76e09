"""The driver's end of dead letters in files: what killed engines left, what is written again, what is missing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.letters import letter, write

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.deadletters.files import LetterFile, LettersTarget, ensure_outcomes_id, make_row, read_outcomes_id
from tidemill.runtime.link.progress import EngineProgress
from tidemill.spark.bounded.letter_run import check_letters, forget_letters, letter_run
from tidemill.spark.bounded.task import ChunkResult


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"dlq": {"path": str(tmp_path / "letters")}})


@pytest.fixture
def outcomes(tmp_path: Path) -> Path:
    (tmp_path / "outcomes").mkdir()
    return tmp_path / "outcomes"


def test_what_killed_engines_left_goes_with_the_next_run_of_their_outcomes_and_no_other(
    settings: Settings, outcomes: Path
) -> None:
    mine = ensure_outcomes_id(outcomes, "aaaaaaaa")
    for outcomes_id in (mine, "bbbbbbbb"):
        LetterFile(LettersTarget(settings.dlq.path, "r", "", outcomes_id), 0, "e").write([make_row(letter(1))])
    with letter_run(settings, outcomes):
        assert [path.name for path in Path(settings.dlq.path).iterdir()] == ["_letters-bbbbbbbb-e-00000"]


def test_letters_of_outcomes_that_are_replaced_are_removed(settings: Settings, outcomes: Path) -> None:
    ensure_outcomes_id(outcomes, "aaaaaaaa")
    write(Path(settings.dlq.path), [letter(1)], run="aaaaaaaa")
    kept = write(Path(settings.dlq.path), [letter(2)], run="bbbbbbbb")
    forget_letters(settings, outcomes)
    forget_letters(settings, outcomes / "nowhere")
    assert list(Path(settings.dlq.path).iterdir()) == [kept]


def test_every_run_has_an_id_of_its_own_and_a_folder_of_outcomes_keeps_its(settings: Settings, outcomes: Path) -> None:
    with letter_run(settings, outcomes) as first, letter_run(settings, outcomes) as second:
        assert first._run != second._run
        assert first._outcomes_id == second._outcomes_id == read_outcomes_id(outcomes) == first._run


def test_files_that_are_not_where_they_are_looked_for_are_counted(settings: Settings, outcomes: Path) -> None:
    there = write(Path(settings.dlq.path), [letter(1)])
    results = [ChunkResult(0, True, EngineProgress(), [there.name]), ChunkResult(1, True, EngineProgress(), ["none"])]
    with letter_run(settings, outcomes) as run:
        run.check(results[:1])
        with pytest.raises(ConfigError, match=r"1 of 2 dead-letter files are not in .*all hosts share"):
            run.check(results)


def test_without_a_path_nothing_is_touched(outcomes: Path) -> None:
    settings = Settings()
    check_letters(settings)
    forget_letters(settings, outcomes)
    with letter_run(settings, outcomes) as run:
        run.check([ChunkResult(0, True, EngineProgress())])
    assert list(outcomes.iterdir()) == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ChunkResult(0, True, EngineProgress())), type=ChunkResult)


def test_a_folder_that_cannot_be_written_is_refused_before_spark(settings: Settings) -> None:
    Path(settings.dlq.path).touch()
    with pytest.raises(ConfigError, match=r"dlq\.path: dead letters cannot be written to .*File exists"):
        check_letters(settings)
