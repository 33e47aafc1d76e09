"""Finding the handler: what is imported, and what is said when it is not there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.cli.pipelines.handlers import load_handler
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler

GOOD = """
from tidemill.pipeline.handler.base import Handler
class LogHandler(Handler): pass
class NeedsMore(Handler):
    def __init__(self, size): self.size = size
class Raises(Handler):
    def __init__(self): raise RuntimeError("no")
ready = NeedsMore(5)
class NoHandler: pass
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Write `my_handlers.py`; what was imported and the path are as before at the end."""
    path, modules = sys.path[:], set(sys.modules)

    def write(text: str) -> None:
        (tmp_path / "my_handlers.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("my_handlers"):
            del sys.modules[name]


Write = Callable[[str], None]


def refused(spec: str, folder: Path) -> str:
    with pytest.raises(HandlerError) as caught:
        load_handler(spec, folder)
    return str(caught.value)


def test_a_class_of_a_module_in_the_folder_is_found(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    handler = load_handler("my_handlers:LogHandler", tmp_path)

    assert isinstance(handler, Handler)
    assert type(handler).__name__ == "LogHandler"


def test_an_instance_is_taken_as_it_is(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    assert load_handler("my_handlers:ready", tmp_path).size == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["my_handlers", ":X", "my_handlers:"])
def test_a_text_that_names_no_class_says_how_to_write_it(tmp_path: Path, spec: str) -> None:
    assert "write module:Class" in refused(spec, tmp_path)


def test_a_file_instead_of_a_module_says_the_module(tmp_path: Path) -> None:
    assert "name the module instead: jobs.my_handlers:X" in refused("./jobs/my_handlers.py:X", tmp_path)


def test_a_missing_module_says_where_it_was_looked_for_and_the_nearest(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    message = refused("my_handler:LogHandler", tmp_path)

    assert "no module 'my_handler' was found" in message
    assert str(tmp_path) in message
    assert "did you mean 'my_handlers'?" in message


def test_a_link_to_a_file_that_is_gone_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "my_handlers.py").symlink_to(tmp_path / "gone.py")

    assert "did you mean" not in refused("my_handlers:LogHandler", tmp_path)


def test_a_missing_class_says_the_nearest(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    assert "did you mean my_handlers:LogHandler?" in refused("my_handlers:LogHandlr", tmp_path)


def test_a_module_without_any_handler_says_so(module: Write, tmp_path: Path) -> None:
    module("from tidemill.pipeline.handler.base import Handler\n")

    assert "it defines no handler" in refused("my_handlers:X", tmp_path)


def test_a_module_that_needs_a_missing_one_says_which_and_where(module: Write, tmp_path: Path) -> None:
    module("\nimport no_such_dependency\n")

    message = refused("my_handlers:X", tmp_path)

    assert "needs the module 'no_such_dependency', which is not installed" in message
    assert "my_handlers.py:2" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\n1 / 0\n", r"ZeroDivisionError: division by zero \(.*my_handlers\.py:3\)"),
        ("def x(:\n", r"SyntaxError: [^(]*\(\S*my_handlers\.py:1\)$"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_module_that_raises_says_what_and_where(module: Write, tmp_path: Path, text: str, expected: str) -> None:
    module(text)

    with pytest.raises(HandlerError, match=expected):
        load_handler("my_handlers:X", tmp_path)


def test_a_class_that_is_not_a_handler_is_refused(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    assert "name a class that inherits from tidemill.Handler" in refused("my_handlers:NoHandler", tmp_path)


def test_a_class_that_requires_arguments_is_named_with_its_place_and_what_to_do(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    message = refused("my_handlers:NeedsMore", tmp_path)

    assert f"cannot be created, because its __init__ requires size ({tmp_path}/my_handlers.py:4)" in message
    assert "give them defaults, or create an instance in the module" in message
    assert "(--handler my_handlers:my_instance)" in message
    assert "handlers.py:" not in message.replace("my_handlers.py:", "")


def test_a_class_whose_init_raises_is_blamed_on_the_line_that_raised(module: Write, tmp_path: Path) -> None:
    module(GOOD)

    message = refused("my_handlers:Raises", tmp_path)

    assert f"its __init__ raised RuntimeError: no ({tmp_path}/my_handlers.py:7)" in message


def test_a_class_that_cannot_be_created_for_another_reason_is_blamed_on_itself(module: Write, tmp_path: Path) -> None:
    module(GOOD + "class Odd(Handler):\n    __init__ = 3\n")

    assert "raised TypeError: 'int' object is not callable" in refused("my_handlers:Odd", tmp_path)
    assert f"({tmp_path}/my_handlers.py:10)" in refused("my_handlers:Odd", tmp_path)
