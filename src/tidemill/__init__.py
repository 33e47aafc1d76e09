"""Turn streams of events into finished work.

Everything a user imports is here, and importing it is cheap: a name is loaded from its module when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.config.sink_types import SINK_TYPES
from tidemill.lazy_exports import load_export

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
    from tidemill.runtime.kafka.source_message import SourceMessage
    from tidemill.runtime.process.exitcode import ExitCode
    from tidemill.sinks.payloads import *  # noqa: F403 - the payloads of all sink types
    from tidemill.sinks.payloads import CollectResult, CustomPayload
    from tidemill.spark.pipeline import Pipeline

_MODULES: dict[str, tuple[str, ...]] = {
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
    "tidemill.runtime.process.exitcode": ("ExitCode",),
    "tidemill.runtime.kafka.source_message": ("SourceMessage",),
    "tidemill.sinks.payloads": ("CollectResult", "CustomPayload"),
    "tidemill.spark.pipeline": ("Pipeline",),
}
_PAYLOADS = [kind.payload.partition(":") for kind in SINK_TYPES.values()]
for _module, _, _name in _PAYLOADS:
    _MODULES[_module] = (*_MODULES.get(_module, ()), _name)

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
__all__ += [name for _, _, name in _PAYLOADS]


def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
