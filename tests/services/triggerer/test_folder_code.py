"""The code of triggers, which changes while the process that runs them lives."""

from __future__ import annotations

import importlib
import os
import sys
import time

import pytest

from tidemill.services.triggerer.tasks.folder_code import FolderCode


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "code_a.py").write_text("import code_b\nVALUE = code_b.VALUE\n")
    (tmp_path / "code_b.py").write_text("VALUE = 1\n")
    yield tmp_path
    for name in ("code_a", "code_b"):
        sys.modules.pop(name, None)


def test_what_has_not_changed_stays_imported(folder):
    code = FolderCode(folder)
    code.import_modules(["code_a"])
    before = sys.modules["code_a"]

    assert code.forget_changed() == []
    assert code.forget_changed() == []
    assert importlib.import_module("code_a") is before


def test_a_module_is_imported_again_when_another_one_of_the_folder_has_changed(folder):
    code = FolderCode(folder)
    code.import_modules(["code_a"])
    code.forget_changed()

    (folder / "code_b.py").write_text("VALUE = 1 + 1\n")

    assert code.forget_changed() == ["code_b"]
    assert importlib.import_module("code_a").VALUE == 2


def test_a_file_from_the_future_has_not_changed(folder):
    later = time.time() + 3600  # or the clock was set back
    os.utime(folder / "code_a.py", (later, later))
    code = FolderCode(folder)
    code.import_modules(["code_a"])
    before = sys.modules["code_a"]

    assert code.forget_changed() == []
    assert importlib.import_module("code_a") is before


def test_a_module_that_was_saved_while_it_was_imported_is_imported_again(folder):
    text = "import pathlib\nVALUE = 1\npathlib.Path(__file__).write_text('VALUE = 2')\n"
    (folder / "code_b.py").write_text(text)
    code = FolderCode(folder)
    code.import_modules(["code_a"])

    assert code.forget_changed() == ["code_b"]
    assert importlib.import_module("code_a").VALUE == 2
    assert code.forget_changed() == []


def test_one_whose_file_is_gone_is_forgotten(folder):
    code = FolderCode(folder)
    code.import_modules(["code_a"])
    code.forget_changed()

    (folder / "code_a.py").unlink()

    assert code.forget_changed() == ["code_a"]
    assert "code_a" not in sys.modules


def test_one_that_cannot_be_imported_is_no_trouble_before_it_is_used(folder):
    (folder / "code_c.py").write_text("raise SystemExit\n")

    FolderCode(folder).import_modules(["code_c", "code_d", "code_b"])

    assert "code_b" in sys.modules
