"""Packs a handler for its journey to the engines, and says by name what cannot travel.

Modules that an engine may be unable to import (the main module, the files beside the user's program) travel by
value; installed packages and this one travel by name. The few things that pickle only by name (a function under
`functools.lru_cache`) are found on the engine's host if it has the driver's folders, which it has in local mode.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark import cloudpickle

import tidemill
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler


def pack_handler(handler: Handler[Any, Any]) -> bytes:
    """Return the handler, pickled with all of its code that engines do not have.

    Raises:
        HandlerError: Something in it cannot be pickled; names it, and says what to do.
    """
    with _own_modules_by_value():
        try:
            packed: bytes = cloudpickle.dumps(handler)
        except Exception as error:
            raise HandlerError(_explained(handler, error)) from error
        try:
            cloudpickle.loads(packed)
        except Exception as error:
            raise HandlerError(
                f"{type(handler).__name__} can be pickled, but not unpickled as engines have to: "
                f"{type(error).__name__}: {error}"
            ) from error
    return packed


def own_folders() -> list[str]:
    """Return the folders that this process imports from besides installed packages."""
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    return [str(folder) for folder in folders if folder.is_dir() and not _is_installed(folder)]


def _explained(handler: Handler[Any, Any], error: Exception) -> str:
    name = type(handler).__name__
    advice = (
        "handlers are pickled after on_startup and travel to the engines; make what cannot travel "
        "(connections, locks, open files, clients) in on_ready, which runs in each engine"
    )
    for owner, values in ((name, vars(handler)), (f"class {name}", _class_values(type(handler)))):
        for attribute, value in values.items():
            try:
                cloudpickle.dumps(value)
            except Exception as reason:
                return (
                    f"the attribute {attribute!r} of {owner} (a {type(value).__qualname__}) cannot be pickled: "
                    f"{reason}; {advice}"
                )
    return f"{name} cannot be pickled: {type(error).__name__}: {error}; {advice}"


def _class_values(cls: type) -> dict[str, Any]:
    """Return what the class and its bases hold, without what every class has."""
    values: dict[str, Any] = {}
    for klass in cls.__mro__:
        if klass not in (Handler, object) and not (klass.__module__ or "").startswith("typing"):
            values = {key: value for key, value in vars(klass).items() if not key.startswith("__")} | values
    return values


@contextlib.contextmanager
def _own_modules_by_value() -> Iterator[None]:
    registered = []
    already = set(cloudpickle.list_registry_pickle_by_value())
    try:
        for module in list(sys.modules.values()):
            if _is_own(module) and module.__name__ not in already:
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType) -> bool:
    """Tell whether a module is a file of the user's, not installed anywhere."""
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", "")
    if not file or not name or name == "__main__" or sys.modules.get(name) is not module:
        return False  # cloudpickle itself takes __main__ by value
    return not _is_installed(Path(file).resolve())


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _installed())


@functools.cache
def _installed() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(path).resolve() for name in names if (path := sysconfig.get_paths().get(name))]
    return [*folders, Path(tidemill.__file__).resolve().parent]
