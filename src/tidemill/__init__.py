"""Turn streams of events into finished work.

Everything a user imports is here, and importing it is cheap: a name is loaded from its module when it is first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tidemill.config.sink_types import SINK_TYPES

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.core.errors import (
        AmbiguousSinkError,
        ConfigError,
        HandlerError,
        RemoteError,
        SinkNotConfiguredError,
        TidemillError,
    )
    from tidemill.pipeline.handler.base import Handler
    from tidemill.pipeline.handler.models import (
        DeliveryAction,
        DeliveryError,
        ErrorAction,
        ErrorKind,
        ExecutorError,
        ExecutorResult,
        ExecutorTask,
        MessageGroup,
        PendingContext,
        PrecomputedResult,
        SkipMessage,
        make_stable_task_id,
        make_task_id,
    )
    from tidemill.pipeline.handler.periodic import periodic
    from tidemill.runtime.exitcode import ExitCode
    from tidemill.runtime.messages import SourceMessage
    from tidemill.sinks.payloads import *  # noqa: F403 - the payloads of all sink types
    from tidemill.sinks.payloads import CollectResult, CustomPayload
    from tidemill.spark.pipeline import Pipeline

_MODULES = {
    "tidemill.config.settings": ("Settings",),
    "tidemill.core.errors": (
        "AmbiguousSinkError",
        "ConfigError",
        "HandlerError",
        "RemoteError",
        "SinkNotConfiguredError",
        "TidemillError",
    ),
    "tidemill.pipeline.handler.base": ("Handler",),
    "tidemill.pipeline.handler.models": (
        "DeliveryAction",
        "DeliveryError",
        "ErrorAction",
        "ErrorKind",
        "ExecutorError",
        "ExecutorResult",
        "ExecutorTask",
        "MessageGroup",
        "PendingContext",
        "PrecomputedResult",
        "SkipMessage",
        "make_stable_task_id",
        "make_task_id",
    ),
    "tidemill.pipeline.handler.periodic": ("periodic",),
    "tidemill.runtime.exitcode": ("ExitCode",),
    "tidemill.runtime.messages": ("SourceMessage",),
    "tidemill.sinks.payloads": ("CollectResult", "CustomPayload"),
    "tidemill.spark.pipeline": ("Pipeline",),
}
_PAYLOADS = {name: module for module, _, name in (kind.payload.partition(":") for kind in SINK_TYPES.values())}
_PLACES = {**{name: module for module, names in _MODULES.items() for name in names}, **_PAYLOADS}

__all__ = [
    "AmbiguousSinkError",
    "CollectResult",
    "ConfigError",
    "CustomPayload",
    "DeliveryAction",
    "DeliveryError",
    "ErrorAction",
    "ErrorKind",
    "ExecutorError",
    "ExecutorResult",
    "ExecutorTask",
    "ExitCode",
    "Handler",
    "HandlerError",
    "MessageGroup",
    "PendingContext",
    "Pipeline",
    "PrecomputedResult",
    "RemoteError",
    "Settings",
    "SinkNotConfiguredError",
    "SkipMessage",
    "SourceMessage",
    "TidemillError",
    "make_stable_task_id",
    "make_task_id",
    "periodic",
]
__all__ += list(_PAYLOADS)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
