"""The table of sink types: the only list of types, with everything that distinguishes them.

A new type needs a module in `sinks`, its settings, its payload, one field of `CollectResult` and one entry here.
Classes are import paths (`module:Class`), so that reading the table imports none of them, and a sink's client library
is imported only if the sink is configured.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class SinkType(NamedTuple):
    """One type of sink.

    Attributes:
        name: The key below `sinks` in the configuration, and the extra that installs the client library.
        plural: The noun for its instances, for descriptions.
        settings: The class of its section.
        payload: The class of its payloads.
        field: The field of `CollectResult` that takes the payloads.
        sink: The class that sends them.
        sends_json: Whether `data` is sent as JSON. A redrive then sends times, decimals and the like as they are in the
            dead letter; for other types it restores the values that the handler returned.
        json_op: If set, `sends_json` applies only to payloads with this `op`.
    """

    name: str
    plural: str
    settings: str
    payload: str
    field: str
    sink: str
    sends_json: bool
    json_op: str = ""

    @property
    def payload_name(self) -> str:
        """The name of the payload class."""
        return self.payload.rpartition(":")[2]


#: By name. The order is the one in which payloads of a result are routed, and keys made for them depend on it.
SINK_TYPES: Mapping[str, SinkType] = {
    kind.name: kind
    for kind in (
        SinkType(
            name="kafka",
            plural="Topics",
            settings="tidemill.config.sections.sink_settings:KafkaSinkSettings",
            payload="tidemill.sinks.payloads:KafkaPayload",
            field="kafka",
            sink="tidemill.sinks.kafka:KafkaSink",
            sends_json=True,
        ),
        SinkType(
            name="postgres",
            plural="PostgreSQL databases",
            settings="tidemill.config.sections.sink_settings:PostgresSinkSettings",
            payload="tidemill.sinks.payloads:PostgresPayload",
            field="postgres",
            sink="tidemill.sinks.postgres:PostgresSink",
            sends_json=False,
        ),
        SinkType(
            name="mongo",
            plural="MongoDB databases",
            settings="tidemill.config.sections.sink_settings:MongoSinkSettings",
            payload="tidemill.sinks.payloads:MongoPayload",
            field="mongo",
            sink="tidemill.sinks.mongo:MongoSink",
            sends_json=False,
        ),
        SinkType(
            name="http",
            plural="HTTP endpoints",
            settings="tidemill.config.sections.sink_settings:HttpSinkSettings",
            payload="tidemill.sinks.payloads:HttpPayload",
            field="http",
            sink="tidemill.sinks.http:HttpSink",
            sends_json=True,
        ),
        SinkType(
            name="redis",
            plural="Redis databases",
            settings="tidemill.config.sections.sink_settings:RedisSinkSettings",
            payload="tidemill.sinks.payloads:RedisPayload",
            field="redis",
            sink="tidemill.sinks.redis:RedisSink",
            sends_json=True,
            json_op="set",
        ),
        SinkType(
            name="filesystem",
            plural="Folders",
            settings="tidemill.config.sections.sink_settings:FilesystemSinkSettings",
            payload="tidemill.sinks.payloads:FilePayload",
            field="files",
            sink="tidemill.sinks.files:FilesystemSink",
            sends_json=True,
        ),
    )
}


def load_class(path: str) -> Any:
    """Import a class of the table.

    Args:
        path: `module:Class`.

    Raises:
        ImportError: The module, or a library that it needs, cannot be imported.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def name_sink_section(kind: str) -> str:
    """Return the section that configures the sinks of a type, for messages.

    Example:
        >>> name_sink_section("kafka"), name_sink_section("mine")
        ('sinks.kafka', 'sinks.custom.mine')
    """
    return f"sinks.{kind}" if kind in SINK_TYPES else f"sinks.custom.{kind}"
