"""Serializes a trigger for the process that will run it, and checks that it can be created again.

Invariant: the result has been tried: the class can be imported by its classpath, accepts the arguments, and serializes
to the same arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tidemill.config.redaction import redact
from tidemill.core.errors import describe_error
from tidemill.dags.exceptions import DagError
from tidemill.dags.scope import DAG_MODULE
from tidemill.runtime.json.codec import encode_sorted
from tidemill.triggers.base import BaseTrigger


def write_trigger(trigger: Any) -> tuple[str, str]:
    """Return the classpath and the encoded arguments of a trigger.

    Raises:
        DagError: The object is not a trigger, or cannot be created again from the result of `serialize`.
    """
    if not isinstance(trigger, BaseTrigger):
        raise DagError(f"{trigger!r} is not a trigger; it must inherit from tidemill.triggers.base.BaseTrigger")
    kind = type(trigger).__name__
    classpath, kwargs = _serialize(trigger, kind)
    cls = find_trigger_class(classpath, kind)
    try:
        again = cls(**kwargs)
    except Exception as error:
        raise DagError(
            f"{classpath} does not accept the kwargs that serialize() of {kind} returns: {describe_error(error)}"
        ) from error
    text = encode_sorted(kwargs, f"kwargs of {kind}")
    classpath_again, kwargs_again = _serialize(again, kind)
    if classpath_again != classpath or encode_sorted(kwargs_again, f"kwargs of {kind}") != text:
        raise DagError(
            f"serialize() of {kind} must return the arguments that the trigger was created with; created with "
            f"{_show(classpath, kwargs)}, it returns {_show(classpath_again, kwargs_again)}"
        )
    return classpath, text


def check_triggers(owner: str, given: Mapping[str, Any]) -> None:
    """Check the triggers among the arguments of a task.

    Raises:
        DagError: A trigger cannot be imported or does not round-trip; the message names the task and the argument.
    """
    for name, value in given.items():
        if isinstance(value, BaseTrigger):
            try:
                write_trigger(value)
            except ValueError as error:
                raise DagError(f"{owner}: argument {name!r}: {error}") from error


def _serialize(trigger: BaseTrigger, kind: str) -> tuple[str, dict[str, Any]]:
    try:
        classpath, kwargs = trigger.serialize()
        return str(classpath), dict(kwargs)
    except Exception as error:
        raise DagError(f"serialize() of {kind} must return a classpath and kwargs: {describe_error(error)}") from error


def find_trigger_class(classpath: str, kind: str) -> Any:
    """Import the class of a trigger.

    Args:
        classpath: Its import path.
        kind: The name of the trigger, for messages.

    Raises:
        DagError: There is no such class, or a triggerer cannot import it.
    """
    module_name, _, name = classpath.rpartition(".")
    if module_name.startswith(DAG_MODULE):
        raise DagError(
            f"{kind} is defined in a DAG file, which triggerers do not import; move it to a module next to the file"
        )
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise DagError(
            f"{kind} cannot be imported as {classpath!r}: {describe_error(error)}; define the class at the top level "
            "of a module, and use its import path"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, BaseTrigger)):
        raise DagError(f"{classpath!r} is not a trigger class; it must inherit from tidemill.triggers.base.BaseTrigger")
    return cls


def _show(classpath: str, kwargs: Mapping[str, Any]) -> str:
    shown = sorted(redact(dict(kwargs)).items())
    text = f"{classpath}({', '.join(f'{name}={value!r}' for name, value in shown)})"
    return text if len(text) <= 300 else f"{text[:300]}..."
