"""What a hook hands to a sink: one small value per delivery, named after the sink's type.

`data` is a pydantic model, a dict (or list), a str, or bytes. Models, containers and text are sent as JSON, bytes as
they are; databases get the values of a model or a dict as they are (bytes are read as a JSON object). An empty `sink`
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
        key: Text as UTF-8; by it the partition is chosen.
        data: None writes a tombstone.
        headers: Names and values, in order; as pairs, a name may come several times.
        partition: Instead of the one that the key chooses.
        timestamp: Milliseconds since the epoch, or a datetime with a time zone; None: when it is sent.
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
        data: append: one line; replace: the content, text and bytes as they are.
        op: append (add a line); replace (put this in place of whatever the file has).
    """

    sink: str = ""
    path: str = ""
    data: Any = None
    op: Literal["append", "replace"] = "append"


class PostgresPayload(msgspec.Struct, frozen=True, omit_defaults=True):
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


class MongoPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """One write: `sinks.mongo.<sink>`.

    Attributes:
        sink: The instance.
        collection: Its name.
        data: The document; for upsert, update and update_many the fields to set, or update operators
            (`{"$inc": ...}`).
        op: insert; upsert (update one, or insert it if none is found); update, delete (one); update_many, delete_many
            (all that are found); replace (the whole document, inserted if none is found).
        filter: Which documents are concerned; never one that finds any document. An insert has none.
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
        data: The body; None is no body with GET and DELETE.
        method: GET, POST, PUT, PATCH or DELETE; '' is the sink's.
        path: Below the sink's URL, as text that is not encoded.
        query: Added to that of the sink's URL; a list says its name several times.
        headers: Besides the sink's, or instead of those of the same name.
        body: json; form (names and values as of an HTML form).
        idempotency_key: Goes with each of its requests; '' makes one of the messages, the task's id, and the payload's
            place in what the hook returned: the same one when they are worked on again.
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
        key: Without the sink's prefix.
        data: By `op`: set any; incrby a whole number; incrbyfloat a number; hset and stream a model or a dict; push,
            sadd and srem one element, or a list of them; hdel and zrem one name, or a list of them; zadd a dict of
            member and score; ltrim the first and the last place to keep; script a list of arguments; delete and
            expire None.
        ttl: The key ends after so many seconds; None: nothing is said about that.
        op: What is done.
        script: For `script`: the name of one in the sink's `scripts`.
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
        return any(msgspec.structs.astuple(self))
