"""Creates triggers from a classpath and keyword arguments, and checks what they fire.

Invariant: what a class, its module or its constructor raises is that trigger's own failure, with its traceback.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import msgspec

from tidemill.core.errors import HandlerError, describe_error
from tidemill.services.triggerer.trigger_list import encode_kwargs
from tidemill.store.content import check_identity, check_payload
from tidemill.triggers.base import BaseTrigger, TriggerEvent

_encode = msgspec.json.Encoder().encode


class TriggerError(HandlerError):
    """A trigger cannot be created, or does something that no trigger may do."""


def create_trigger(name: str, classpath: str, kwargs: str) -> BaseTrigger:
    """Return a trigger.

    Args:
        name: Its stable id.
        classpath: `package.module.Class`.
        kwargs: JSON text.

    Raises:
        TriggerError: The classpath names no trigger class, or the constructor raised; the cause is chained.
    """
    module_name, _, class_name = classpath.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise TriggerError(
            f"the module {module_name!r} of {classpath} cannot be imported: {describe_error(error)}; start the "
            "host where it can"
        ) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise TriggerError(f"the module {module_name!r} has no {class_name!r}; correct the classpath {classpath}")
    if not (isinstance(cls, type) and issubclass(cls, BaseTrigger)):
        raise TriggerError(f"{classpath} is not a trigger class; it has to inherit from tidemill's BaseTrigger")
    try:
        trigger = cls(**json.loads(kwargs))
    except (Exception, SystemExit) as error:
        raise TriggerError(f"{classpath} cannot be created with its kwargs: {describe_error(error)}") from error
    trigger.trigger_id = name
    return trigger


def serialize_trigger(trigger: BaseTrigger) -> tuple[str, str]:
    """Return the classpath and kwargs (JSON text) from which the same trigger can be created.

    Raises:
        TriggerError: `serialize` raised, or returned something that JSON cannot hold.
    """
    try:
        classpath, kwargs = trigger.serialize()
        return str(classpath), encode_kwargs(_copy_kwargs(kwargs))
    except (Exception, SystemExit) as error:
        raise TriggerError(
            f"serialize() of {type(trigger).__name__} has to return a classpath and kwargs that JSON can hold: "
            f"{describe_error(error)}"
        ) from error


def encode_payload(event: object) -> str:
    """Return the payload of what a trigger fired as JSON text.

    Raises:
        TriggerError: It is not an event, or its payload cannot be written as JSON or stored.
    """
    if type(event) is not TriggerEvent and not isinstance(event, TriggerEvent):
        raise TriggerError(f"a trigger yields TriggerEvents, not {type(event).__name__}")
    try:
        payload = _encode(event.payload).decode()
        check_payload(payload)
    except Exception as error:
        raise TriggerError(
            f"the payload of an event cannot be written as JSON: {type(error).__name__}: {error}; yield plain values"
        ) from error
    return payload


def read_identity(event: TriggerEvent) -> str | None:
    """Return the identity of an event.

    Raises:
        TriggerError: It is not text, or cannot be stored.
    """
    # Trigger classes may have an event class of their own.
    identity = getattr(event, "identity", None)
    if identity is None:
        return None
    if not isinstance(identity, str):
        raise TriggerError(f"the identity of an event is a text or None, not {type(identity).__name__}")
    try:
        check_identity(identity)
    except ValueError as error:
        raise TriggerError(str(error)) from error
    # Databases do not accept a subclass of `str` (of NumPy, lxml, an enum).
    return str.__str__(identity)


def _copy_kwargs(kwargs: Any) -> dict[str, Any]:
    return dict(kwargs)
