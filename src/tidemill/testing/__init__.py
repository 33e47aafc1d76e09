"""Public support for testing handlers, pipelines and sinks, including a pytest plugin that is found automatically.

`run_handler` runs a handler over messages without Kafka and Spark, using `ScriptedSource`, `ScriptedSink` and
`ScriptedDeadLetters`; `run_on_virtual_clock` runs timers without waiting; `EmbeddedBroker` is a real Kafka broker, also
available through the fixtures `embedded_kafka` and `own_kafka`; `SinkContract` and `JsonSinkContract` are test suites
for sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.lazy_exports import load_export

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker
    from tidemill.testing.clock import VirtualClockLoop, run_on_virtual_clock
    from tidemill.testing.contract import JsonSinkContract, SinkContract, deliver, deliver_at_last
    from tidemill.testing.run import HandlerRun, MessageOutcome, run_handler, run_handler_async
    from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSink, ScriptedSource

_MODULES = {
    "tidemill.runtime.embedded.broker": ("EmbeddedBroker",),
    "tidemill.testing.clock": ("VirtualClockLoop", "run_on_virtual_clock"),
    "tidemill.testing.contract": ("JsonSinkContract", "SinkContract", "deliver", "deliver_at_last"),
    "tidemill.testing.run": ("HandlerRun", "MessageOutcome", "run_handler", "run_handler_async"),
    "tidemill.testing.scripted": ("ScriptedDeadLetters", "ScriptedSink", "ScriptedSource"),
}

__all__ = [
    "EmbeddedBroker",
    "HandlerRun",
    "JsonSinkContract",
    "MessageOutcome",
    "ScriptedDeadLetters",
    "ScriptedSink",
    "ScriptedSource",
    "SinkContract",
    "VirtualClockLoop",
    "deliver",
    "deliver_at_last",
    "run_handler",
    "run_handler_async",
    "run_on_virtual_clock",
]


# pytest imports this package in every run to load the plugin, so nothing heavy is imported before it is used.
def __getattr__(name: str) -> object:
    return load_export(__name__, _MODULES, name)
