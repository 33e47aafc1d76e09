"""Loads the handler that `--handler module:Class` names, or explains why that fails."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import HandlerError, TidemillError, describe_error
from tidemill.runtime.log.user_code import locate_class, locate_error

if TYPE_CHECKING:
    from tidemill.pipeline.handler.base import Handler


def load_handler(spec: str, folder: Path | None = None) -> Handler[Any, Any]:
    """Return the handler that a text like `handler:LogHandler` names.

    Args:
        spec: Module and class; an instance or a nested name like `module:factory.handler` works too.
        folder: The folder to search first; None: the current folder.

    Raises:
        HandlerError: The handler cannot be imported or created; the message says what to do.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise HandlerError(f"{spec!r} does not name a handler; {_suggest(spec)}")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise HandlerError(f"{module_name!r} is a file; name the module instead: {dotted}:{name}")
    folder = folder or Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return _create(_find(_import(module_name, folder), name), spec)


def _suggest(spec: str) -> str:
    """Return a correction for a text that lacks a module or a class."""
    module, _, name = spec.rpartition(".")
    if module and name[:1].isupper() and ":" not in spec:
        return f"did you mean {module}:{name}?"
    return "write module:Class, for example handler:LogHandler"


def _import(name: str, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The missing module may be one that the handler's module imports.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise HandlerError(
                f"the module {name!r} needs the module {error.name!r}, which is not installed; install it where "
                f"tidemill runs{_at(locate_error(error))}"
            ) from error
        near = difflib.get_close_matches(name, [path.stem for path in folder.glob("*.py") if path.is_file()], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise HandlerError(
            f"no module {name!r} was found in {folder} or among the installed packages; {hint}"
            "run tidemill in the folder that contains the module"
        ) from error
    except TidemillError as error:
        raise HandlerError(f"importing the module {name!r} failed: {error}") from error
    except (Exception, SystemExit) as error:
        # The text of a syntax error repeats file and line.
        said = error.msg if isinstance(error, SyntaxError) else error
        raise HandlerError(
            f"importing the module {name!r} failed: {type(error).__name__}: {said}{_at(locate_error(error))}"
        ) from error


def _find(module: ModuleType, name: str) -> Any:
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
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {module.__name__}:{near[0]}?"
                if near
                else f"it defines {', '.join(known) or 'no handler'}"
            )
            raise HandlerError(f"the module {module.__name__!r} has no {name!r}; {hint}")
    return value


def _create(value: Any, spec: str) -> Handler[Any, Any]:
    from tidemill.pipeline.handler.base import Handler

    if isinstance(value, Handler):
        return value
    if not (inspect.isclass(value) and issubclass(value, Handler)):
        raise HandlerError(f"{spec} is not a handler; name a class that inherits from tidemill.Handler")
    if missing := _find_required(value):
        raise HandlerError(
            f"{spec} cannot be created, because its __init__ requires {', '.join(missing)}{_at(locate_class(value))}, "
            "and tidemill passes no arguments; give them defaults, or create an instance in the module and name that "
            f"(--handler {spec.partition(':')[0]}:my_instance)"
        )
    try:
        instance: Handler[Any, Any] = value()
    except Exception as error:
        where = locate_error(error) or locate_class(value)
        raise HandlerError(
            f"{spec} cannot be created, because its __init__ raised {describe_error(error)}{_at(where)}; fix __init__"
        ) from error
    return instance


def _find_required(cls: type[Any]) -> list[str]:
    """Return the required arguments of a class."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]


def _at(location: str) -> str:
    return f" ({location})" if location else ""
