"""Carries an exception to the process that runs a callback: its class and where it was raised.

The text is JSON with the class and the frames of the traceback, without any values; the message travels separately as
the error shown to users. Invariant: a rebuilt exception has the original's class name and the given message; it has the
original class if that can be imported.
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

#: Longer tracebacks lose frames in the middle.
_MAX_FRAMES: Final = 40
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)(?:: (.*))?", re.DOTALL)


class RebuiltError(TaskError):
    """Stands for an exception whose class cannot be imported, under the name of that class."""


def write_origin(error: BaseException) -> str:
    """Return the class and the traceback frames of an exception, as JSON."""
    cls = type(error)
    locations = [(one.filename, one.lineno or 1, one.name) for one in traceback.extract_tb(error.__traceback__)]
    if len(locations) > _MAX_FRAMES:
        locations = locations[: _MAX_FRAMES // 2] + locations[-_MAX_FRAMES // 2 :]
    return json.dumps([cls.__module__, cls.__qualname__, locations])


def rebuild_exception(error: str, origin: str | None) -> BaseException:
    """Return an exception that stands for one raised in an earlier process.

    Args:
        error: The error shown to users: class name and message, or only a description.
        origin: The result of `write_origin`; None if unknown, or if nothing was raised.
    """
    named = _NAMED.fullmatch(error)
    try:
        module, name, locations = json.loads(origin or "null")
    except (ValueError, TypeError):
        # The worker, a trigger or the scheduler reported the error, by the name of one of our exceptions.
        found = getattr(exceptions, named[1], None) if named is not None else None
        return _build(found, named[1], named[2] or "") if named is not None and found is not None else TaskError(error)
    plain = name.rpartition(".")[2]
    message = (named[2] or "") if named is not None and named[1] == plain else error
    rebuilt = _build(_find_class(module, name), plain, message)
    return rebuilt.with_traceback(_build_traceback(locations))


def _find_class(module: str, name: str) -> Any:
    """Return the class of an exception; None if it does not exist."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # the import may raise any exception; `<locals>` has no attribute path
        return getattr(builtins, name, None)
    return found


def _build(cls: Any, name: str, message: str) -> BaseException:
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        cls = type(name, (RebuiltError,), {})
    with contextlib.suppress(Exception):  # a user's class may raise any exception
        # Bypass the constructor, which may require other arguments.
        error: BaseException = cls.__new__(cls, *([message] if message else []))
        if str(error) == message:
            return error
        shown: Any = type(name, (cls,), {"__str__": lambda self: message, "__module__": cls.__module__})
        return cast(BaseException, shown.__new__(shown, message))
    return _build(None, name, message)


def _build_traceback(locations: list[tuple[str, int, str]]) -> TracebackType | None:
    """Return a traceback with these frames."""
    found: TracebackType | None = None
    for file, line, name in reversed(locations):
        frame = _find_frame(file, int(line), name)
        if frame is not None:
            found = TracebackType(found, frame, frame.f_lasti, int(line))
    return found


def _find_frame(file: str, line: int, name: str) -> FrameType | None:
    """Return a frame with this file, line and function name, taken from code compiled to raise there."""
    code = compile("\n" * (min(line, 1_000_000) - 1) + "raise StopIteration", file, "exec")
    try:
        exec(code.replace(co_name=name), {"__name__": name})  # noqa: S102 - nothing but the line above
    except StopIteration as raised:
        if raised.__traceback__ is not None and raised.__traceback__.tb_next is not None:
            return raised.__traceback__.tb_next.tb_frame
    return None
