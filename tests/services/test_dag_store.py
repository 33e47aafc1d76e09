from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.config.settings import Settings
from tidemill.services.dag_store import choose_folder, choose_url


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "rev-a" / "dags").mkdir(parents=True)
    (tmp_path / "current").symlink_to("rev-a")
    (tmp_path / "linked").symlink_to("rev-a/dags")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "beside"),
    [
        ("current/dags", "."),
        ("linked", "."),
        ("rev-a/dags", "rev-a"),
        ("current", "."),
        ("current/../rev-a/dags", "rev-a"),
    ],
)
def test_the_store_is_never_inside_what_a_link_points_to(site: Path, given: str, beside: str) -> None:
    folder = choose_folder(Settings(), site / given)
    assert choose_url(Settings(), folder) == f"sqlite:///{(site / beside / 'dags.db').resolve()}"


def test_a_link_to_the_current_folder_counts_too(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site / "current")
    monkeypatch.setenv("PWD", str(site / "current"))
    assert choose_folder(Settings(), Path("dags")) == site / "current" / "dags"
    assert choose_url(Settings(), choose_folder(Settings(), None)) == f"sqlite:///{site}/dags.db"
    for shown in ("", "current", str(site), str(site / "gone")):  # a program has changed folders, or set something else
        monkeypatch.setenv("PWD", shown)
        assert choose_folder(Settings(), Path("dags")) == Path(os.getcwd(), "dags")


def test_a_link_that_users_cannot_replace_does_not_move_the_store(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.services.dag_store.os.access", lambda path, mode: False)
    assert choose_url(Settings(), site / "current" / "dags") == f"sqlite:///{site}/current/dags.db"
