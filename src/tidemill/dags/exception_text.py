"""Carries an exception to the process that runs a callback: where it came from, beside what it says.

The text has the class and the places of the traceback, as JSON, and none of the values; the message is the error that
people see. Invariant: what is rebuilt is an exception of the original's name, whose text is the given message; it is of
the original's class where that can be imported.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import re
import traceback
from types import FrameType, TracebackType
from typing import Any, Final, cast

from tidemill.dags import exceptions
from tidemill.dags.exceptions import TaskError

#: More places are left out in the middle.
_PLACES: Final = 40
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)(?:: (.*))?", re.DOTALL)


class RebuiltError(TaskError):
    """Stands for an exception whose class cannot be imported here; has its name."""


def write_origin(error: BaseException) -> str:
    """Return the class and the places of an exception."""
    cls = type(error)
    places = [(one.filename, one.lineno or 1, one.name) for one in traceback.extract_tb(error.__traceback__)]
    if len(places) > _PLACES:
        places = places[: _PLACES // 2] + places[-_PLACES // 2 :]
    return json.dumps([cls.__module__, cls.__qualname__, places])


def rebuild_exception(error: str, origin: str | None) -> BaseException:
    """Return an exception that stands for the one of an earlier process.

    Args:
        error: What people are told: the name of its class and its message, or only what happened.
        origin: What `write_origin` returned; None: it is not known, or nothing was raised.
    """
    named = _NAMED.fullmatch(error)
    try:
        module, name, places = json.loads(origin or "null")
    except (ValueError, TypeError):
        # The worker, a trigger or the scheduler says it, by the names of our own exceptions.
        found = getattr(exceptions, named[1], None) if named is not None else None
        return _build(found, named[1], named[2] or "") if named is not None and found is not None else TaskError(error)
    plain = name.rpartition(".")[2]
    message = (named[2] or "") if named is not None and named[1] == plain else error
    rebuilt = _build(_find_class(module, name), plain, message)
    return rebuilt.with_traceback(_build_traceback(places))


def _find_class(module: str, name: str) -> Any:
    """Return the class of an exception; None: there is none."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # what it imports may raise anything; `<locals>` is in the way
        return getattr(builtins, name, None)
    return found


def _build(cls: Any, name: str, message: str) -> BaseException:
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        cls = type(name, (RebuiltError,), {})
    with contextlib.suppress(Exception):  # a class of the user may raise anything
        # Its constructor may want other arguments.
        error: BaseException = cls.__new__(cls, *([message] if message else []))
        if str(error) == message:
            return error
        shown: Any = type(name, (cls,), {"__str__": lambda self: message, "__module__": cls.__module__})
        return cast(BaseException, shown.__new__(shown, message))
    return _build(None, name, message)


def _build_traceback(places: list[tuple[str, int, str]]) -> TracebackType | None:
    """Return a traceback that shows these places."""
    found: TracebackType | None = None
    for file, line, name in reversed(places):
        frame = _find_frame(file, int(line), name)
        if frame is not None:
            found = TracebackType(found, frame, frame.f_lasti, int(line))
    return found


def _find_frame(file: str, line: int, name: str) -> FrameType | None:
    """Return a frame of a function of this name at a place: that of code that is compiled to raise there."""
    code = compile("\n" * (min(line, 1_000_000) - 1) + "raise StopIteration", file, "exec")
    try:
        exec(code.replace(co_name=name), {"__name__": name})  # noqa: S102 - nothing but the line above
    except StopIteration as raised:
        if raised.__traceback__ is not None and raised.__traceback__.tb_next is not None:
            return raised.__traceback__.tb_next.tb_frame
    return None
