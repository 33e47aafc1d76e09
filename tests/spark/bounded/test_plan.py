"""The folder of a backfill: one backfill, one process, and a plan that never changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.core.ranges import OffsetRange
from tidemill.pipeline.reports.outcomes import name_range
from tidemill.spark.bounded.plan import BackfillFolder, BackfillPlan, format_now

PIECES = [OffsetRange(0, 0, 10), OffsetRange(0, 10, 20)]


@pytest.fixture
def folder(tmp_path: Path) -> BackfillFolder:
    return BackfillFolder(tmp_path / "out")


def save(folder: BackfillFolder) -> BackfillPlan:
    plan = BackfillPlan("orders", "earliest", "latest", PIECES, 0, format_now())
    with folder.locked():
        assert folder.load("orders", "earliest", "latest") is None
        folder.save(plan)
    return plan


def test_a_plan_comes_back_as_it_was(folder: BackfillFolder) -> None:
    plan = save(folder)
    assert folder.load("orders", "earliest", "latest") == plan
    assert plan.total == 20


def test_what_files_tell_of_is_not_left(folder: BackfillFolder) -> None:
    plan = save(folder)
    (folder.path / name_range(OffsetRange(0, 0, 10))).touch()
    (folder.path / name_range(OffsetRange(0, 10, 14))).touch()
    (folder.path / "_part-00000-0000000014-0000000020.parquet-abc").touch()
    assert folder.find_left(plan) == [OffsetRange(0, 14, 20)]
    folder.tidy()
    assert not list(folder.path.glob("_part-*"))
    assert folder.load("orders", "earliest", "latest") == plan


@pytest.mark.parametrize(
    "asked", [("payments", "earliest", "latest"), ("orders", "0", "latest"), ("orders", "earliest", "9")]
)
def test_the_folder_of_another_backfill_is_refused(folder: BackfillFolder, asked: tuple[str, str, str]) -> None:
    save(folder)
    with pytest.raises(ConfigError, match=r"of topic 'orders' from earliest to latest, not .*another folder"):
        folder.load(*asked)


def test_a_folder_with_something_else_is_refused(folder: BackfillFolder) -> None:
    folder.path.mkdir()
    (folder.path / "mine.txt").touch()
    with folder.locked(), pytest.raises(ConfigError, match=r"contains other files \(mine.txt\)"):
        folder.load("orders", "earliest", "latest")


def test_a_plan_that_cannot_be_read_is_refused(folder: BackfillFolder) -> None:
    save(folder)
    (folder.path / "_backfill" / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan.json cannot be read"):
        folder.load("orders", "earliest", "latest")


def test_two_processes_do_not_work_in_one_folder(folder: BackfillFolder) -> None:
    with folder.locked(), pytest.raises(ConfigError, match="another process is running the backfill"), folder.locked():
        pass
    with folder.locked():
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"cannot use the outcomes folder .*file/out"),
        BackfillFolder(tmp_path / "file" / "out").locked(),
    ):
        pass
