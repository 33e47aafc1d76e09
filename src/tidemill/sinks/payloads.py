"""What a hook hands to a sink: one small value per delivery, named after the sink's type.

`data` is a pydantic model, a dict (or list), a str, or bytes. Models, containers and text are sent as JSON, bytes as
they are; databases get the values of a model or a dict as they are (bytes are read as a JSON object). An empty `sink`
means the only configured instance of that type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

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


class PostgresPayload(msgspec.Struct, frozen=True):
    """One row, or one statement of the configuration: `sinks.postgres.<sink>`.

    Attributes:
        sink: The instance.
        table: `table` or `schema.table`, exactly as it is called there.
        data: The columns and their values; of a statement its parameters.
        op: insert; upsert (change the row that is there); update or delete (the rows that `where` finds).
        conflict: The columns that decide whether a row is there. With insert, such a row is left as it is.
        where: Columns and values that an update or delete looks for; None finds NULL.
        statement: A statement of `sinks.postgres.<sink>.statements`, instead of table and operation.
    """

    sink: str = ""
    table: str = ""
    data: Any = None
    op: Literal["insert", "upsert", "update", "delete"] = "insert"
    conflict: str | Sequence[str] = ()
    where: Mapping[str, Any] | None = None
    statement: str = ""


class MongoPayload(msgspec.Struct, frozen=True):
    """One write to one document: `sinks.mongo.<sink>`.

    Attributes:
        sink: The instance.
        collection: Its name.
        data: The document; for upsert and update the fields to set, or update operators (`{"$inc": ...}`).
        op: insert; upsert (insert it if none is found); update; delete.
        filter: Which document is upserted, updated or deleted; never one that finds any document.
    """

    sink: str = ""
    collection: str = ""
    data: Any = None
    op: Literal["insert", "upsert", "update", "delete"] = "insert"
    filter: Mapping[str, Any] | None = None


class HttpPayload(msgspec.Struct, frozen=True):
    """One request: `sinks.http.<sink>`.

    Attributes:
        sink: The instance.
        data: The body.
        idempotency_key: Goes with each of its requests; '' makes one of the messages, the task's id, and the payload's
            place in what the hook returned: the same one when they are worked on again.
    """

    sink: str = ""
    data: Any = None
    idempotency_key: str = ""


class RedisPayload(msgspec.Struct, frozen=True):
    """One command for one key: `sinks.redis.<sink>`.

    Attributes:
        sink: The instance.
        key: Without the sink's prefix.
        data: By `op`: set any; incrby a whole number; hset and stream a model or a dict; push and sadd one element, or
            a list of them; zadd a dict of member and score; delete None.
        ttl: The key ends after so many seconds; None: nothing is said about that.
        op: What is done.
    """

    sink: str = ""
    key: str | bytes = ""
    data: Any = None
    ttl: float | None = None
    op: Literal["set", "delete", "incrby", "hset", "push", "sadd", "zadd", "stream"] = "set"


class CustomPayload(msgspec.Struct, frozen=True):
    """Something for a sink of another package: `sinks.custom.<type>.<sink>`; may be subclassed with more fields.

    Attributes:
        type: The sink's type, as its entry point is called.
        sink: The instance.
        key: For the order of deliveries, if the sink has one.
        data: What it takes.
    """

    type: str = ""
    sink: str = ""
    key: Any = None
    data: Any = None


Payload = KafkaPayload | FilePayload | PostgresPayload | MongoPayload | HttpPayload | RedisPayload | CustomPayload


class CollectResult(msgspec.Struct):
    """Everything a hook wants delivered, by type of sink.

    Example:
        >>> CollectResult(files=[FilePayload(path="out.jsonl", data={"ok": True})]).has_outputs
        True
    """

    kafka: Sequence[KafkaPayload] = ()
    postgres: Sequence[PostgresPayload] = ()
    mongo: Sequence[MongoPayload] = ()
    http: Sequence[HttpPayload] = ()
    redis: Sequence[RedisPayload] = ()
    files: Sequence[FilePayload] = ()
    custom: Sequence[CustomPayload] = ()

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to deliver."""
        return bool(self.kafka or self.postgres or self.mongo or self.http or self.redis or self.files or self.custom)
