"""Finds the handler that `--handler module:Class` names, and says what to do when it is not there."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import HandlerError, TidemillError

if TYPE_CHECKING:
    from tidemill.pipeline.handler.base import Handler


def load_handler(spec: str, folder: Path | None = None) -> Handler[Any, Any]:
    """Return the handler that a text like `handler:LogHandler` names.

    Args:
        spec: Module and class; an instance, or a nested name like `module:factory.handler`, will do.
        folder: Where modules are looked for first; None: the current folder.

    Raises:
        HandlerError: It cannot be imported or made; says what to do.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise HandlerError(f"{spec!r} names no handler; write module:Class, for example handler:LogHandler")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise HandlerError(f"{module_name!r} is a file; name the module instead: {dotted}:{name}")
    folder = folder or Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return _made(_found(_imported(module_name, folder), name), spec)


def _imported(name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another module may be the missing one: imported by the handler's.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise HandlerError(
                f"the module {name!r} needs the module {error.name!r}, which is not installed; install it where "
                f"tidemill runs ({_place(error)})"
            ) from error
        near = difflib.get_close_matches(name, [path.stem for path in folder.glob("*.py")], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise HandlerError(
            f"there is no module {name!r}, neither in {folder} nor among the installed packages; {hint}"
            "run tidemill in the folder where the module is"
        ) from error
    except TidemillError as error:
        raise HandlerError(f"importing the module {name!r} failed: {error}") from error
    except (Exception, SystemExit) as error:
        # The text of a syntax error names file and line too.
        said = error.msg if isinstance(error, SyntaxError) else error
        raise HandlerError(
            f"importing the module {name!r} failed: {type(error).__name__}: {said} ({_place(error)})"
        ) from error


def _found(module: ModuleType, name: str) -> Any:
    from tidemill.pipeline.handler.base import Handler

    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
        if value is None:
            known = [
                found
                for found, item in vars(module).items()
                if isinstance(item, Handler)
                or (inspect.isclass(item) and issubclass(item, Handler) and item is not Handler)
            ]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or known[:1]
            hint = f"did you mean {module.__name__}:{near[0]}?" if near else "it has no handler at all"
            raise HandlerError(f"the module {module.__name__!r} has no {name!r}; {hint}")
    return value


def _made(value: Any, spec: str) -> Handler[Any, Any]:
    from tidemill.pipeline.handler.base import Handler

    if isinstance(value, Handler):
        return value
    if not (inspect.isclass(value) and issubclass(value, Handler)):
        raise HandlerError(f"{spec} is not a handler; it has to be a class that inherits from tidemill.Handler")
    try:
        made: Handler[Any, Any] = value()
    except Exception as error:
        raise HandlerError(
            f"{spec} cannot be made without arguments: {type(error).__name__}: {error} ({_place(error)}); give "
            "its arguments defaults, or name an instance instead of the class"
        ) from error
    return made


def _place(error: BaseException) -> str:
    """Return file and line of the user's code where an error came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
