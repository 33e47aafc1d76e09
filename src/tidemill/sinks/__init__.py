"""The public interface of sinks: the names that a sink of your own imports.

A name is loaded from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.lazy_exports import load_export

if TYPE_CHECKING:
    from tidemill.sinks.base import WAITS, Answers, Encoded, Refusal, Sink, SinksByName
    from tidemill.sinks.payloads import CollectResult, CustomPayload

_MODULES = {
    ".base": (
        "Answers",
        "Encoded",
        "Refusal",
        "Sink",
        "SinksByName",
        "WAITS",
    ),
    ".payloads": (
        "CollectResult",
        "CustomPayload",
    ),
}

__all__ = [
    "WAITS",
    "Answers",
    "CollectResult",
    "CustomPayload",
    "Encoded",
    "Refusal",
    "Sink",
    "SinksByName",
]


def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
