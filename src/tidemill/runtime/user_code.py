"""Finds the place in the user's code that an error came from; tidemill's own lines help nobody to correct theirs."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

_OWN = str(Path(__file__).parents[1]) + "/"
#: Below tidemill's folder, but written like a user's code.
_EXAMPLES = _OWN + "examples/"


def locate_error(error: BaseException) -> str:
    """Return `file:line` of the last frame outside tidemill and the import system; '' if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def locate_class(cls: type) -> str:
    """Return `file:line` of where a class is written; '' if it is not in a file."""
    try:
        return f"{inspect.getfile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or "importlib" in filename:
        return False
    return not filename.startswith(_OWN) or filename.startswith(_EXAMPLES)
