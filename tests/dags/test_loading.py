from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.dags import DagError
from tidemill.dags.loading import combine_digests, digest_files, load_file

DAGS = """
from tidemill.dags import DAG, EmptyOperator, dag
import shared_by_dags
from package_of_dags import inner

with DAG("opened"):
    EmptyOperator(task_id="t")
kept = DAG("kept")

@dag
def called():
    EmptyOperator(task_id="t")

called()

def not_called():
    with DAG("hidden"):
        pass
"""


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:] = path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_dags_are_found_whether_kept_opened_or_called(tmp_path: Path) -> None:
    write(tmp_path, "shared_by_dags.py", "")
    write(tmp_path, "package_of_dags/__init__.py", "")
    write(tmp_path, "package_of_dags/inner.py", "")
    path = write(tmp_path, "sub/file.py", DAGS)
    loaded = load_file(path, tmp_path)
    assert sorted(loaded.dags) == ["called", "kept", "opened"]
    names = ["package_of_dags/__init__.py", "package_of_dags/inner.py", "shared_by_dags.py", "sub/file.py"]
    assert sorted(loaded.modules) == names
    assert loaded.digest == combine_digests(loaded.modules) == digest_files(tmp_path, names)
    write(tmp_path, "shared_by_dags.py", "X = 1")
    assert digest_files(tmp_path, names) != loaded.digest
    assert not list(tmp_path.rglob("__pycache__"))
    assert loaded.dags["opened"].fileloc == str(path)


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = write(tmp_path, "file.py", "from tidemill.dags import DAG\nd = DAG('a')")
    assert list(load_file(path, tmp_path).dags) == ["a"]
    write(tmp_path, "file.py", "from tidemill.dags import DAG\nd = DAG('b')")
    assert list(load_file(path, tmp_path).dags) == ["b"]


def test_files_that_are_saved_while_they_are_imported_are_seen_to_have_changed(tmp_path: Path) -> None:
    save = "import pathlib\npathlib.Path(__file__).write_text('X = 2')\n"
    write(tmp_path, "saved_package/__init__.py", "")
    write(tmp_path, "saved_package/inner.py", save)
    write(tmp_path, "saved_module.py", save)
    names = ["file.py", "saved_module.py", "saved_package/__init__.py", "saved_package/inner.py"]
    path = write(tmp_path, "file.py", "import saved_module, saved_package.inner\n" + save)
    before = {name: digest_files(tmp_path, [name]) for name in names}
    finders = list(sys.meta_path)
    loaded = load_file(path, tmp_path)
    assert {name: combine_digests({name: digest}) for name, digest in loaded.modules.items()} == before
    assert digest_files(tmp_path, names) != loaded.digest
    assert sys.meta_path == finders


def test_a_file_may_change_how_modules_are_found(tmp_path: Path) -> None:
    path = write(tmp_path, "file.py", "import sys\nsys.meta_path.pop(0)\nsys.path.insert(0, 7)\nsys.path.pop(0)")
    load_file(path, tmp_path)


def test_what_a_file_does_to_the_path_stays_with_it(tmp_path: Path) -> None:
    path = write(tmp_path, "file.py", "import sys\nsys.path.insert(0, '/nowhere')\nsys.path.pop()")
    before = list(sys.path)
    load_file(path, tmp_path)
    assert sys.path == [str(tmp_path), *before]
    load_file(path, tmp_path)
    assert sys.path == [str(tmp_path), *before]


def test_two_dags_of_one_id_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "file.py", "from tidemill.dags import DAG\na = DAG('a')\nb = DAG('a')")
    with pytest.raises(DagError, match="the file has two DAGs 'a'; give them different ids"):
        load_file(path, tmp_path)


def test_a_file_that_is_also_imported_is_refused_with_the_name_of_the_module(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "imports_itself.py",
        "import imports_itself\nfrom tidemill.dags import DAG\na = DAG('a')\nwith a:\n    pass",
    )
    with pytest.raises(DagError, match="also imported, as module 'imports_itself', which creates its DAG 'a' again"):
        load_file(path, tmp_path)


def test_a_trigger_that_a_dag_file_defines_is_refused(tmp_path: Path) -> None:
    text = """
from tidemill.dags import DAG, EmptyOperator
from tidemill.triggers.base import BaseTrigger
class Own(BaseTrigger):
    def serialize(self):
        return f"{__name__}.Own", {}
    async def run(self):
        yield
class Waiting(EmptyOperator):
    def __init__(self, trigger, **kwargs):
        super().__init__(**kwargs)
with DAG("a"):
    Waiting(task_id="t", trigger=Own())
"""
    path = write(tmp_path, "file.py", text)
    with pytest.raises(DagError, match=r"task 't': argument 'trigger': Own is defined in a DAG file"):
        load_file(path, tmp_path)


def test_what_a_file_raises_is_raised(tmp_path: Path) -> None:
    path = write(tmp_path, "file.py", "raise SystemExit(3)")
    with pytest.raises(SystemExit):
        load_file(path, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "missing.py", tmp_path)
