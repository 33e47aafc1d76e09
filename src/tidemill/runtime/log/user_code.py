"""Finds the line of the user's code that an error came from; tidemill's own lines do not help users."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path

from tidemill.core.errors import describe_error
from tidemill.runtime.log.tracebacks import CodePaths

_OWN = str(Path(__file__).parents[2]) + "/"
#: Below tidemill's folder, but written like user code.
_EXAMPLES = _OWN + "examples/"


def locate_error(error: BaseException) -> str:
    """Return `file:line` of the last frame outside tidemill and the import system; '' if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def explain_error(error: BaseException, hook: str) -> str:
    """Return a hook's error, with the innermost line of the user's own code if the error came from there.

    For example `ValueError: no number (handler.py:12 in arrange)`; never raises.
    """
    causes = [error] if error.__cause__ is None else [error, error.__cause__]
    line = next(filter(None, (_find_own_line(each, hook) for each in causes)), "")
    return f"{describe_error(error)} ({line})" if line else describe_error(error)


def _find_own_line(error: BaseException, hook: str) -> str:
    code_paths = _build_code_paths()
    found = [frame for frame in _list_frames(error) if _is_users(frame[0])]
    own = [frame for frame in found if code_paths.is_users(frame[0])]
    # A handler may be installed like a library; users cannot correct code of other libraries.
    own = own or [frame for frame in found[:1] if frame[2] == hook]
    if not own:
        return ""
    file, line, name = own[-1]
    return f"{code_paths.shorten(file)}:{line} in {name}"


def _list_frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function, the outermost first; no source is read."""
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        yield code.co_filename, entry.tb_lineno, code.co_name
        entry = entry.tb_next


@functools.cache
def _build_code_paths() -> CodePaths:
    try:
        return CodePaths()
    except FileNotFoundError:  # the current folder was removed
        return CodePaths(here=_OWN.rstrip("/"))


def locate_class(cls: type) -> str:
    """Return `file:line` of a class's definition; '' if it is not in a file."""
    try:
        return f"{inspect.getfile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or "importlib" in filename:
        return False
    return not filename.startswith(_OWN) or filename.startswith(_EXAMPLES)
