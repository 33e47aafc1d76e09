from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tidemill.dags.opened_files import MAX_FILES, OpenedFiles, sign_file


def test_files_and_folders_that_are_read_are_listed_with_how_they_looked_before(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "below").mkdir()
    opened = OpenedFiles()
    with opened.watch():
        json.loads((tmp_path / "a.json").read_bytes())
        list((tmp_path / "below").glob("*.yaml"))
        with pytest.raises(FileNotFoundError):
            (tmp_path / "missing.json").read_bytes()
        os.close(os.open(tmp_path / "a.json", os.O_RDONLY))
        os.fdopen(os.dup(0)).close()  # a descriptor is no file
    signatures = opened.list_signatures()
    names = {str(tmp_path / name) for name in ("a.json", "below", "missing.json")}
    assert {path: sign_file(path) for path in names} == signatures
    (tmp_path / "missing.json").touch()
    (tmp_path / "below" / "new.yaml").touch()
    assert sign_file(tmp_path / "missing.json") != signatures[str(tmp_path / "missing.json")] == ()
    assert sign_file(tmp_path / "below") != signatures[str(tmp_path / "below")]
    with open(tmp_path / "a.json"):  # nobody watches
        assert opened.list_signatures() == signatures


def test_what_is_written_meanwhile_is_left_out(tmp_path: Path) -> None:
    opened = OpenedFiles()
    with opened.watch():
        with tempfile.TemporaryDirectory(dir=tmp_path) as name:
            Path(name, "own.json").write_text("{}")
            Path(name, "own.json").read_text()
            os.listdir(name)
        (tmp_path / "new").write_text("x")
        (tmp_path / "new").rename(tmp_path / "renamed")
        (tmp_path / "renamed").read_text()
        os.truncate(tmp_path / "renamed", 0)
    assert opened.list_signatures() == {}


def test_modules_are_listed_by_their_source_unless_they_are_installed(tmp_path: Path) -> None:
    (tmp_path / "listed_module.py").write_text("import mailbox")
    sys.path.insert(0, str(tmp_path))
    try:
        for _ in range(2):  # the second time it is read from its compiled form
            opened = OpenedFiles()
            with opened.watch():
                import listed_module  # noqa: F401
            sys.modules.pop("listed_module")
            assert list(opened.list_signatures()) == [str(tmp_path / "listed_module.py")]
    finally:
        sys.path.remove(str(tmp_path))


def test_no_more_than_a_limited_number_is_kept(tmp_path: Path) -> None:
    opened = OpenedFiles()
    with opened.watch():
        for number in range(MAX_FILES + 5):
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / f"{number}").read_bytes()
    assert len(opened.list_signatures()) == MAX_FILES
