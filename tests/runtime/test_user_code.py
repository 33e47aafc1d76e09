"""Where in a user's code an error came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import HandlerError
from tidemill.runtime.log import user_code
from tidemill.runtime.log.tracebacks import CodePaths
from tidemill.runtime.log.user_code import explain_error

HERE = "tests/runtime/test_user_code.py"


def _own(text: str) -> Any:
    return json.loads(text)


def caught(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(user_code, "_build_code_paths", lambda: CodePaths(here=root))


def test_an_error_is_told_with_the_innermost_line_of_the_users_own() -> None:
    text = explain_error(caught(lambda: _own("{")), "arrange")
    line = _own.__code__.co_firstlineno + 1
    assert text.startswith("JSONDecodeError: ")
    assert text.endswith(f" ({HERE}:{line} in _own)")


def test_what_tidemill_made_of_it_is_looked_through() -> None:
    def fail() -> None:
        try:
            raise SystemExit(3)
        except SystemExit as error:
            raise HandlerError("the hook called sys.exit(3)") from error

    wrapped = caught(fail)
    wrapped.__traceback__ = None
    assert explain_error(wrapped, "arrange").startswith(f"HandlerError: the hook called sys.exit(3) ({HERE}:")


def test_without_a_line_of_the_users_own_there_is_only_the_text() -> None:
    assert explain_error(ValueError("no"), "arrange") == "ValueError: no"
    assert explain_error(caught(lambda: CodePaths(1, 2, 3, 4)), "arrange").startswith("TypeError: ")  # type: ignore[call-arg, arg-type]
    bare = ValueError("no")
    bare.__cause__ = KeyError("x")
    assert explain_error(bare, "arrange") == "ValueError: no"


def test_a_handler_that_is_installed_like_a_library_is_told_by_the_hook() -> None:
    scope: dict[str, Any] = {"json": json}
    source = "def arrange(text):\n    return json.loads(text)\n"
    exec(compile(source, "/x/site-packages/mine/handler.py", "exec"), scope)
    error = caught(lambda: scope["arrange"]("{"))
    # Without the frames of this file, which would be the user's own.
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert explain_error(error, "arrange").endswith("(/x/site-packages/mine/handler.py:2 in arrange)")
    # To another hook it is a library like others, in which nobody could correct anything.
    assert "handler.py" not in explain_error(error, "transform")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_whose_text_cannot_be_read_has_its_place() -> None:
    def fail() -> None:
        raise Mute

    assert explain_error(caught(fail), "arrange").startswith(f"Mute: its text cannot be read ({HERE}:")


def test_a_current_folder_that_was_removed_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    user_code._build_code_paths.cache_clear()
    assert explain_error(caught(lambda: _own("{")), "arrange").endswith(
        f"{HERE}:{_own.__code__.co_firstlineno + 1} in _own)"
    )
    user_code._build_code_paths.cache_clear()
