"""What a list is refused for before anything runs, and what stays a trigger's own failure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.services.triggerer.hosting.loading import BUILTIN_CLASSPATHS, find_class
from tidemill.services.triggerer.lists.checking import add_import_folders, check_list, read_checked

MODULE = """
from tidemill.triggers.base import BaseTrigger
class Fires(BaseTrigger):
    def __init__(self, count, *, pause_seconds=1.0):
        if count < 0: raise ValueError("count has to be positive")
    def serialize(self): return "checked_triggers.Fires", {}
    async def run(self): yield
class Open(Fires):
    def __init__(self, **kwargs): pass
class Unfinished(BaseTrigger):
    def serialize(self): return "", {}
class Other: pass
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a list beside a module of triggers; what was imported is as before at the end."""
    path, modules = sys.path[:], set(sys.modules)
    (tmp_path / "checked_triggers.py").write_text(MODULE)
    (tmp_path / "checked_broken.py").write_text("import no_such_dependency\n")
    (tmp_path / "checked_raising.py").write_text("\n1 / 0\n")
    importlib.invalidate_caches()

    def write(*entries: str) -> Path:
        specs = tmp_path / "spec.yaml"
        specs.write_text("".join(f"- {{{entry}}}\n" for entry in entries))
        add_import_folders(specs)
        return specs

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("checked_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("classpath: checked_triggers.Fire", "has no 'Fire'; did you mean checked_triggers.Fires?"),
        ("classpath: checked_triggers.Zzz", "has no 'Zzz'; it has Fires, Open, Unfinished"),
        (
            "classpath: checked_trigger.Fires",
            "checked_trigger.Fires: no module 'checked_trigger' was found; did you mean",
        ),
        ("classpath: zzz.Zzz", "zzz.Zzz: no module 'zzz' was found; put it beside the list"),
        ("classpath: checked_triggers.Other", "is not a trigger class; make it inherit from"),
        (
            "classpath: checked_triggers.Unfinished",
            "does not define run; every trigger has to define run and serialize",
        ),
        (
            "classpath: checked_triggers.Fires, kwargs: {count: 1, pause_second: 2}",
            "has no argument 'pause_second'; did you mean pause_seconds?",
        ),
        ("classpath: checked_triggers.Fires, kwargs: {zzz: 1}", "no argument 'zzz'; it has count, pause_seconds"),
        ("classpath: checked_triggers.Fires", "checked_triggers.Fires requires count; add it to kwargs"),
        ("classpath: tidemill.KafkaTrigger", "did you mean tidemill.triggers.builtin.kafka.KafkaTrigger?"),
        ("classpath: tidemill.triggers.builtin.kafca.KafkaTriger", "did you mean tidemill.triggers.builtin.kafka.Kaf"),
        ("classpath: tidemill.triggers.builtin.file.FileTriger", "did you mean tidemill.triggers.builtin.file.FileTri"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest_name_and_its_line(write: Write, entry: str, said: str) -> None:
    specs = write("name: good, classpath: checked_triggers.Fires, kwargs: {count: 1}", f"name: bad, {entry}")
    with pytest.raises(ConfigError) as caught:
        read_checked(specs)
    [problem] = str(caught.value).splitlines()
    assert problem.startswith(f"{specs}:2: entry 2 (bad): ")
    assert said in problem


def test_all_misspelt_entries_are_named_at_once(write: Write) -> None:
    specs = write("name: a, classpath: zzz.A", "name: b, classpath: zzz.A", "name: c, classpath: checked_triggers.B")
    with pytest.raises(ConfigError) as caught:
        read_checked(specs)
    assert len(str(caught.value).splitlines()) == 3


def test_what_a_module_or_a_constructor_raises_fails_its_trigger_only_but_a_check_names_it(write: Write) -> None:
    specs = write(
        "name: needs, classpath: checked_broken.A",
        "name: raises, classpath: checked_raising.A",
        "name: wrong, classpath: checked_triggers.Fires, kwargs: {count: -1}",
        "name: open, classpath: checked_triggers.Open, kwargs: {anything: 1}",
    )
    assert [spec.name for spec in read_checked(specs)] == ["needs", "raises", "wrong", "open"]
    with pytest.raises(ConfigError) as caught:
        check_list(specs)
    needs, raises, wrong = str(caught.value).splitlines()
    assert "its module needs 'no_such_dependency', which is not installed" in needs
    assert "ZeroDivisionError: division by zero" in raises
    assert "checked_raising.py:2)" in raises
    assert "rejected its kwargs: count has to be positive (" in wrong
    assert "checked_triggers.py:5)" in wrong


def test_a_valid_list_is_counted(write: Write) -> None:
    assert check_list(write("name: a, classpath: checked_triggers.Fires, kwargs: {count: 1}")) == 1


@pytest.mark.parametrize("classpath", BUILTIN_CLASSPATHS)
def test_the_triggers_that_are_suggested_exist(classpath: str) -> None:
    assert find_class(classpath).__name__ == classpath.rpartition(".")[2]
