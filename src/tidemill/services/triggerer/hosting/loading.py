"""Creates triggers from a classpath and keyword arguments, and checks the events that they fire.

Invariant: an error of a class, its module or its constructor becomes a failure of that trigger alone, with its
traceback.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec

from tidemill.core.errors import ConfigError, HandlerError, describe_error, escape_surrogates
from tidemill.core.wording import shorten
from tidemill.runtime.json import codec
from tidemill.runtime.log.user_code import locate_error
from tidemill.store.calls.trigger_calls import EventEnding
from tidemill.store.content import check_identity, check_payload
from tidemill.triggers.base import BaseTaskEndEvent, BaseTrigger, TriggerEvent

#: The module of each built-in trigger. These names are suggested whatever module a classpath names.
_BUILTIN = {
    "DateTimeTrigger": "temporal",
    "DirectoryTrigger": "directory",
    "FileTrigger": "file",
    "HttpTrigger": "http",
    "KafkaTrigger": "kafka",
    "ProcessExitTrigger": "process",
    "SqsTrigger": "sqs",
    "TimeDeltaTrigger": "temporal",
}
#: Longer errors of events are cut.
_MAX_ERROR = 20_000
BUILTIN_CLASSPATHS = tuple(f"tidemill.triggers.builtin.{module}.{name}" for name, module in _BUILTIN.items())


class TriggerError(HandlerError):
    """A trigger cannot be created, or violates a rule for triggers."""


class MisspeltError(TriggerError):
    """A classpath or an argument names nothing that exists, so the trigger can only fail."""


def create_trigger(name: str, classpath: str, kwargs: str) -> BaseTrigger:
    """Create a trigger.

    Args:
        name: Its stable id.
        classpath: `package.module.Class`.
        kwargs: The keyword arguments, as text of `runtime.json.codec`.

    Raises:
        TriggerError: The classpath names no trigger class, or the constructor raised; the cause is chained.
    """
    cls = find_class(classpath)
    arguments = codec.decode(kwargs)
    if not isinstance(arguments, dict):
        raise TriggerError(f"{classpath} needs a dict of arguments, got {shorten(repr(arguments), 100)}")
    check_arguments(cls, classpath, arguments)
    try:
        trigger = cls(**arguments)
    except (TypeError, ValueError, ConfigError) as error:
        raise TriggerError(
            f"{classpath} rejected its kwargs: {str(error) or describe_error(error)}{_at(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise TriggerError(f"{classpath} cannot be created: {describe_error(error)}{_at(error)}; correct it") from error
    trigger.trigger_id = name
    return trigger


def find_class(classpath: str) -> type[BaseTrigger]:
    """Import a trigger class.

    Raises:
        MisspeltError: There is no such module or class, or it is not a trigger class.
        TriggerError: Importing its module failed.
    """
    module_name, _, class_name = classpath.rpartition(".")
    module = _import_module(module_name, classpath)
    cls = getattr(module, class_name, None)
    if cls is None:
        known = [name for name, value in vars(module).items() if _is_trigger(value) and value is not BaseTrigger]
        near = _suggest(class_name, known, f"{module_name}.") or _suggest_builtin(class_name)
        advice = near or ("it has " + ", ".join(known) if known else "it has no trigger class")
        raise MisspeltError(f"{classpath}: the module {module_name!r} has no {class_name!r}; {advice}")
    if not _is_trigger(cls):
        raise MisspeltError(
            f"{classpath} is not a trigger class; make it inherit from tidemill.triggers.base.BaseTrigger"
        )
    if inspect.isabstract(cls):
        missing = " and ".join(sorted(cls.__abstractmethods__))
        raise MisspeltError(f"{classpath} does not define {missing}; every trigger has to define run and serialize")
    found: type[BaseTrigger] = cls
    return found


def check_arguments(cls: type[BaseTrigger], classpath: str, kwargs: Mapping[str, Any]) -> None:
    """Check that a class accepts keyword arguments of these names.

    Raises:
        MisspeltError: The class does not accept one of them, or requires one that is missing.
    """
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return  # for example a class written in C; its constructor raises the error
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        known = list(kwargs)
    else:
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in kwargs:
        if name not in known:
            advice = _suggest(name, known) or ("it has " + ", ".join(known) if known else "it has none")
            raise MisspeltError(f"{classpath} has no argument {name!r}; {advice}")
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in kwargs
    ]
    if missing:
        raise MisspeltError(
            f"{classpath} requires {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'} to kwargs"
        )


def _import_module(name: str, classpath: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The missing module may be one that the trigger's module imports.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise TriggerError(
                f"{classpath}: its module needs {error.name!r}, which is not installed; install it where the host runs"
            ) from error
        advice = _suggest_builtin(classpath.rpartition(".")[2]) or _suggest_module(error.name)
        raise MisspeltError(
            f"{classpath}: no module {error.name!r} was found; "
            + (advice or "put it beside the list, or start the host in the folder that contains it")
        ) from error
    except (Exception, SystemExit) as error:
        # The text of a SyntaxError already contains file and line.
        said = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else describe_error(error)
        raise TriggerError(f"{classpath}: importing its module failed: {said}{_at(error)}") from error


def _at(error: BaseException) -> str:
    where = locate_error(error)
    return f" ({where})" if where else ""


def _is_trigger(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseTrigger)


def _suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def _suggest_builtin(class_name: str) -> str:
    near = difflib.get_close_matches(class_name, _BUILTIN, n=1, cutoff=0.8)
    return f"did you mean tidemill.triggers.builtin.{_BUILTIN[near[0]]}.{near[0]}?" if near else ""


def _suggest_module(name: str) -> str:
    """Return a hint naming the sibling module with the most similar name, or ''."""
    parent, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", []) if parent else sys.path[:3]
    return _suggest(last, {found.name for found in pkgutil.iter_modules(list(folders))}, f"{parent}." if parent else "")


def serialize_trigger(trigger: BaseTrigger) -> tuple[str, str]:
    """Return the classpath and kwargs (text of `runtime.json.codec`) from which an equal trigger can be created.

    Raises:
        TriggerError: `serialize` raised, or returned values that cannot be serialized.
    """
    try:
        classpath, kwargs = trigger.serialize()
        return str(classpath), codec.encode_sorted(_copy_kwargs(kwargs), "kwargs")
    except (Exception, SystemExit) as error:
        raise TriggerError(
            f"serialize() of {type(trigger).__name__} must return a classpath and kwargs that can be serialized: "
            f"{describe_error(error)}"
        ) from error


def encode_payload(event: object) -> str:
    """Return the payload of a fired event as text of `runtime.json.codec`.

    Raises:
        TriggerError: The object is not an event, or its payload cannot be written as JSON or stored.
    """
    if type(event) is not TriggerEvent and not isinstance(event, TriggerEvent):
        raise TriggerError(f"a trigger must yield TriggerEvents, not {type(event).__name__}")
    try:
        payload = codec.encode(event.payload, "payload")
        check_payload(payload)
    except Exception as error:
        raise TriggerError(f"the payload of an event cannot be written as JSON: {error}; yield plain values") from error
    return payload


def encode_ending(event: object, mask: Callable[[str], str] = str) -> str | None:
    """Return how an event ends the waiting task, as text for the store; None if it does not.

    Args:
        event: The event.
        mask: Masks secrets in its error.

    Raises:
        TriggerError: Its XComs cannot be stored.
    """
    if not isinstance(event, BaseTaskEndEvent):
        return None
    xcoms, error = event.xcoms, getattr(event, "error", "")
    if xcoms is not None and not (isinstance(xcoms, Mapping) and all(isinstance(key, str) for key in xcoms)):
        raise TriggerError(f"xcoms of a {type(event).__name__} must be a dict with texts as keys, got {xcoms!r}")
    try:
        values = tuple((key, codec.encode(value, f"XCom {key!r}")) for key, value in (xcoms or {}).items())
    except ValueError as fault:
        raise TriggerError(f"xcoms of a {type(event).__name__} cannot be stored: {fault}; pass plain values") from fault
    text = mask(escape_surrogates(str(error)).replace("\0", "\\x00"))
    return msgspec.json.encode(EventEnding(event.state, shorten(text, _MAX_ERROR), values)).decode()


def read_identity(event: TriggerEvent) -> str | None:
    """Return the identity of an event.

    Raises:
        TriggerError: The identity is not a string, or cannot be stored.
    """
    # Trigger classes may yield a subclass with attributes of its own.
    identity = getattr(event, "identity", None)
    if identity is None:
        return None
    if not isinstance(identity, str):
        raise TriggerError(f"the identity of an event must be a string or None, not {type(identity).__name__}")
    try:
        check_identity(identity)
    except ValueError as error:
        raise TriggerError(str(error)) from error
    # Databases do not accept subclasses of `str` (NumPy, lxml, enums).
    return str.__str__(identity)


def _copy_kwargs(kwargs: Any) -> dict[str, Any]:
    return dict(kwargs)
