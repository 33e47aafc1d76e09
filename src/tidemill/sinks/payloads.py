"""The payloads that a hook returns: one small value per delivery, named after the sink's type.

`data` is a pydantic model, a dict (or list), a str, or bytes. Models, containers and text are sent as JSON, bytes
unchanged. Databases get the values of a model or a dict unchanged and read bytes as a JSON object. An empty `sink`
means the only configured instance of that type.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec


class KafkaPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record for a topic: `sinks.kafka.<sink>`.

    Attributes:
        sink: The instance.
        key: The record's key, which decides the partition; text is sent as UTF-8.
        data: The value; None writes a tombstone.
        headers: Names and values, in order; as pairs, a name may occur several times.
        partition: The partition, instead of the one that the key decides.
        timestamp: Milliseconds since the epoch, or a datetime with a time zone; None is the time of sending.
    """

    sink: str = ""
    key: bytes | str | None = None
    data: Any = None
    headers: Mapping[str, bytes | str | None] | Sequence[tuple[str, bytes | str | None]] = ()
    partition: int | None = None
    timestamp: int | datetime.datetime | None = None


class FilePayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One JSON line for a file below the sink's base path, or the whole file: `sinks.filesystem.<sink>`.

    Attributes:
        sink: The instance.
        path: The file, relative to the base path.
        data: For append, one line; for replace, the content, with text and bytes unchanged.
        op: append (add a line); replace (replace the content of the file).
    """

    sink: str = ""
    path: str = ""
    data: Any = None
    op: Literal["append", "replace"] = "append"


class PostgresPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row, or one statement of the configuration: `sinks.postgres.<sink>`.

    Attributes:
        sink: The instance.
        table: `table` or `schema.table`, spelled exactly as in the database.
        data: The columns and their values; for a statement, its parameters. For json columns, a str is a JSON string
            and bytes are JSON text.
        op: insert; upsert (update the row if it exists); update or delete (the rows that match `where`).
        conflict: The columns that identify an existing row. An insert leaves an existing row unchanged.
        where: Columns and values that rows must have for an update or delete; None matches NULL.
        statement: A statement of `sinks.postgres.<sink>.statements`, instead of table and operation.
    """

    sink: str = ""
    table: str = ""
    data: Any = None
    op: Literal["insert", "upsert", "update", "delete"] = "insert"
    conflict: str | Sequence[str] = ()
    where: Mapping[str, Any] | None = None
    statement: str = ""


class MongoPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One write: `sinks.mongo.<sink>`.

    Attributes:
        sink: The instance.
        collection: The collection's name.
        data: The document; for upsert, update and update_many the fields to set, or update operators (`{"$inc": ...}`).
        op: insert; upsert (update one, or insert it if none matches); update, delete (one); update_many, delete_many
            (all that match); replace (the whole document, inserted if none matches).
        filter: Which documents to change; it must not match every document. An insert has no filter.
    """

    sink: str = ""
    collection: str = ""
    data: Any = None
    op: Literal["insert", "upsert", "update", "update_many", "replace", "delete", "delete_many"] = "insert"
    filter: Mapping[str, Any] | None = None


class HttpPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: `sinks.http.<sink>`.

    Attributes:
        sink: The instance.
        data: The body; with GET and DELETE, None means no body.
        method: GET, POST, PUT, PATCH or DELETE; '' is the sink's method.
        path: Appended to the sink's URL, not percent-encoded.
        query: Added to the query of the sink's URL; a list repeats its name.
        headers: Added to the sink's headers; a header of the same name is replaced.
        body: json; form (names and values as in an HTML form).
        idempotency_key: Sent with every request for this payload. '' derives one from the messages, the task's id, and
            the payload's position in the hook's result, so it is the same when the messages are reprocessed.
    """

    sink: str = ""
    data: Any = None
    idempotency_key: str = ""
    method: str = ""
    path: str = ""
    query: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None
    headers: Mapping[str, str] | None = None
    body: Literal["json", "form"] = "json"


class RedisPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One command for one key: `sinks.redis.<sink>`.

    Attributes:
        sink: The instance.
        key: The key without the sink's prefix.
        data: Depends on `op`: any data for set; a whole number for incrby; a number for incrbyfloat; a model or a dict
            for hset and stream; one element or a list of them for push, sadd and srem; one name or a list of them for
            hdel and zrem; a dict of members and scores for zadd; the first and the last index to keep for ltrim; a list
            of arguments for script; None for delete and expire.
        ttl: The key expires after this many seconds; None leaves its expiry unchanged.
        op: The command.
        script: For `script`, its name in the sink's `scripts`.
    """

    sink: str = ""
    key: str | bytes = ""
    data: Any = None
    ttl: float | None = None
    op: Literal[
        "set",
        "delete",
        "expire",
        "incrby",
        "incrbyfloat",
        "hset",
        "hdel",
        "push",
        "ltrim",
        "sadd",
        "srem",
        "zadd",
        "zrem",
        "stream",
        "script",
    ] = "set"
    script: str = ""


class CustomPayload(msgspec.Struct, frozen=True):
    """A payload for a sink of another package: `sinks.custom.<type>.<sink>`; subclasses may add fields.

    Attributes:
        type: The sink's type, which is the name of its entry point.
        sink: The instance.
        key: Orders deliveries, if the sink keeps an order.
        data: Any value that the sink accepts.
    """

    type: str = ""
    sink: str = ""
    key: Any = None
    data: Any = None


#: Any payload.
Payload = KafkaPayload | FilePayload | PostgresPayload | MongoPayload | HttpPayload | RedisPayload | CustomPayload


class CollectResult(msgspec.Struct, frozen=True):
    """Everything that a hook wants delivered, by type of sink.

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
        return any(msgspec.structs.astuple(self))
