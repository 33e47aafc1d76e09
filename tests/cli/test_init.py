"""`tidemill init`: the project runs as it is, and nothing is overwritten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.cli.init import FILES, create_project
from tidemill.config.loading import load_settings
from tidemill.core.errors import ConfigError
from tidemill.runtime.exitcode import ExitCode

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_all_files_are_there_and_the_configuration_is_valid(tidemill: Run, tmp_path: Path) -> None:
    done = tidemill("init", "My Project")

    folder = tmp_path / "My Project"
    assert done.returncode == 0, done.stderr
    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == set(FILES)
    settings = load_settings(folder / "tidemill.yaml", {})
    assert settings.kafka.consumer_group == "my-project"
    assert all("PROJECT_NAME" not in (folder / name).read_text() for name in FILES)


def test_the_projects_own_test_passes(tmp_path: Path) -> None:
    create_project(tmp_path / "project")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "project",
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_commands_of_the_readme_exist(tidemill: Run, tmp_path: Path) -> None:
    create_project(tmp_path / "project")
    readme = (tmp_path / "project" / "README.md").read_text()

    commands = {line.split()[1] for line in readme.splitlines() if line.startswith("    tidemill ")}

    assert commands == {"broker", "doctor", "run"}
    for command in commands:
        assert tidemill(command, "--help").returncode == 0


def test_nothing_is_written_where_something_would_be_overwritten(tidemill: Run, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "handler.py").write_text("mine")

    done = tidemill("init", "project")

    assert done.returncode == ExitCode.CONFIG
    assert "nothing was written" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["handler.py"]
    assert (folder / "handler.py").read_text() == "mine"


def test_a_folder_with_other_files_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")

    assert len(create_project(tmp_path)) == len(FILES)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        create_project(tmp_path / "file" / "project")
    with pytest.raises(ConfigError, match="file is not a folder"):
        create_project(tmp_path / "file")
