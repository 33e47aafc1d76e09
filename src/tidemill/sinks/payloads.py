"""What a hook hands to a sink: one small value per delivery, named after the sink's type.

`data` is a pydantic model, a dict (or list), a str, or bytes. Models, containers and text are sent as JSON, bytes as
they are. An empty `sink` means the only configured instance of that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class KafkaPayload(msgspec.Struct, frozen=True):
    """One record for a topic: `sinks.kafka.<sink>`; `data` None writes a tombstone."""

    sink: str = ""
    key: bytes | str | None = None
    data: Any = None


class FilePayload(msgspec.Struct, frozen=True):
    """One JSON line for a file below the sink's base path: `sinks.filesystem.<sink>`."""

    sink: str = ""
    path: str = ""
    data: Any = None


Payload = KafkaPayload | FilePayload


class CollectResult(msgspec.Struct):
    """Everything a hook wants delivered, by type of sink.

    Example:
        >>> CollectResult(files=[FilePayload(path="out.jsonl", data={"ok": True})]).has_outputs
        True
    """

    kafka: Sequence[KafkaPayload] = ()
    postgres: Sequence[Any] = ()
    mongo: Sequence[Any] = ()
    http: Sequence[Any] = ()
    redis: Sequence[Any] = ()
    files: Sequence[FilePayload] = ()

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to deliver."""
        return bool(self.kafka or self.postgres or self.mongo or self.http or self.redis or self.files)
