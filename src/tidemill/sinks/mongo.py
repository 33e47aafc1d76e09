"""MongoDB as a sink: ordered bulk writes, one write per payload.

Invariants: writes are executed in order. A refused document is named, and only the writes after it are sent again. No
filter matches every document. Inserts get their `_id` before they are sent, so that an insert that is repeated after a
broken connection is recognised.
"""

from __future__ import annotations

import datetime
import decimal
import enum
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import bson
import msgspec
import pymongo
from bson.codec_options import CodecOptions, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo import errors as refused
from pymongo.asynchronous.mongo_client import AsyncMongoClient

from tidemill.config.redaction import find_url_secrets, mask_secrets, redact, redact_text
from tidemill.config.sections.sink_settings import MongoSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.core.wording import shorten
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, close_within, to_mapping
from tidemill.sinks.mongo_filter import matches_everything
from tidemill.sinks.payloads import MongoPayload

#: How long finding a server may take, unless the URI sets a limit.
SELECTION_MILLISECONDS = 5_000
CLOSE_SECONDS = 5.0
#: The server does not accept larger documents.
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
#: The server does not accept larger statements: filter and change together, and what the client wraps around them.
MAX_STATEMENT_BYTES = MAX_DOCUMENT_BYTES + 16 * 1024 - 1024
#: The limit for database and collection together, with the dot between them.
MAX_NAMESPACE_BYTES = 255
#: How many checked names are cached; a full cache is cleared.
MAX_KNOWN_COLLECTIONS = 1_000
_DUPLICATE = 11_000
_UNKNOWN_USER = 18
#: Server codes after which a retry of the same write may succeed: network, elections, shutdown, time limits, conflicts,
#: resources, logins that are being changed.
_PASSING = frozenset(
    {6, 7, 18, 24, 43, 50, 64, 89, 91, 112, 133, 134, 146, 189, 202, 237, 251, 262, 317, 9001}
    | {10058, 10107, 11600, 11601, 11602, 13388, 13435, 13436, 14031}
)
_SIMPLE = frozenset({str, int, bytes, bson.ObjectId})


def _to_bson_value(value: Any) -> Any:
    """Convert a value that BSON cannot represent into one that it can."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, decimal.Decimal):
        return bson.Decimal128(value)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    if isinstance(value, (set, frozenset)):
        return list(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump()
    raise TypeError(f"data contains a value of type {type(value).__name__}, which BSON cannot represent")


_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(
    type_registry=TypeRegistry(fallback_encoder=_to_bson_value),
    uuid_representation=bson.binary.UuidRepresentation.STANDARD,
)
_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
#: Decodes every date that can be encoded.
_LENIENT: CodecOptions[Mapping[str, Any]] = CodecOptions(
    datetime_conversion=bson.codec_options.DatetimeConversion.DATETIME_MS
)

Write = (
    pymongo.InsertOne[Any]
    | pymongo.UpdateOne
    | pymongo.UpdateMany
    | pymongo.ReplaceOne[Any]
    | pymongo.DeleteOne
    | pymongo.DeleteMany
)
#: Operations without data.
_DELETES = frozenset({"delete", "delete_many"})
_OPERATIONS = ("insert", "upsert", "update", "update_many", "replace", "delete", "delete_many")


class _Job(msgspec.Struct, frozen=True, gc=False):
    """One write.

    Attributes:
        collection: The collection's name.
        operation: The operation.
        found: The filter as BSON; b'' for an insert.
        body: The document or the change as BSON; b'' for a delete.
    """

    collection: str
    operation: str
    found: bytes
    body: bytes

    def to_write(self) -> Write:
        """Return the write for the client."""
        if self.operation == "insert":
            return pymongo.InsertOne(RawBSONDocument(self.body))
        found = RawBSONDocument(self.found)
        match self.operation:
            case "delete":
                return pymongo.DeleteOne(found)
            case "delete_many":
                return pymongo.DeleteMany(found)
            case "replace":
                return pymongo.ReplaceOne(found, RawBSONDocument(self.body), upsert=True)
            case "update_many":
                return pymongo.UpdateMany(found, RawBSONDocument(self.body))
        return pymongo.UpdateOne(found, RawBSONDocument(self.body), upsert=self.operation == "upsert")

    def identify(self) -> Mapping[str, Any]:
        """Return the fields that identify the document."""
        if self.operation == "insert":
            return {"_id": bson.decode(self.body, _LENIENT)["_id"]}
        return bson.decode(self.found, _LENIENT)


class MongoSink(Sink):
    """One `sinks.mongo.<name>`.

    Args:
        name: The instance's name.
        settings: The instance's section.
    """

    type: ClassVar[str] = "mongo"
    max_batch_count = 1_000
    max_batch_bytes = 8 * 1024 * 1024

    def __init__(self, name: str, settings: MongoSinkSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._secrets = find_url_secrets(settings.uri)
        self._collections: set[str] = set()
        self._client: AsyncMongoClient[Any] | None = None

    async def connect(self) -> None:
        """Connect, and check that the server answers.

        Raises:
            ConfigError: The URI is wrong, asks for unacknowledged writes, or the server does not know the user.
            RemoteError: The server does not answer.
        """
        where = redact_text(self._settings.uri)
        options: dict[str, Any] = {}
        if "serverselectiontimeoutms" not in self._settings.uri.lower():
            options["serverSelectionTimeoutMS"] = SELECTION_MILLISECONDS
        try:
            client: AsyncMongoClient[Any] = AsyncMongoClient(self._settings.uri, **options)
        except (refused.PyMongoError, ValueError) as error:
            raise ConfigError(f"{self.section}: {where}: {self._describe(error)}; correct uri") from None
        if not client.write_concern.acknowledged:
            raise ConfigError(f"{self.section}: {where}: w=0 asks for unacknowledged writes; remove it from uri")
        try:
            await client.admin.command("ping")
        except refused.OperationFailure as error:
            await close_within(CLOSE_SECONDS, client.close())
            kind = ConfigError if error.code == _UNKNOWN_USER else RemoteError
            raise kind(f"{self.section}: {where}: {self._describe(error)}; correct uri") from None
        except refused.PyMongoError as error:
            await close_within(CLOSE_SECONDS, client.close())
            raise RemoteError(f"{self.section}: {where}: {self._describe(error)}; {CHECK} uri") from None
        except BaseException:
            await close_within(CLOSE_SECONDS, client.close())
            raise
        self._client = client

    def _describe(self, error: BaseException) -> str:
        # After these words, the client lists the state of every server.
        return mask_secrets(
            describe_error(error).partition(", Timeout: ")[0].partition(", full error: ")[0], self._secrets
        )

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: MongoPayload) -> Encoded:
        """Return the write, in its wire form.

        Raises:
            TypeError: `data` is not a mapping, or has a value without a BSON form.
            ValueError: The fields of the payload do not fit together, or the filter matches every document.
        """
        if payload.collection not in self._collections:
            _check_collection(payload.collection, self._settings.database)
            if len(self._collections) >= MAX_KNOWN_COLLECTIONS:
                self._collections.clear()
            self._collections.add(payload.collection)
        if payload.op == "insert":
            return self._insert(payload)
        if payload.op not in _OPERATIONS:
            raise ValueError(f"unknown op {shorten(repr(payload.op))}; use one of {', '.join(_OPERATIONS)}")
        identity = payload.filter
        if not isinstance(identity, Mapping):
            raise TypeError(f"{payload.op} of {payload.collection} needs a filter: fields and the values to look for")
        found = _encode(identity)
        # The encoded filter is checked, as the server gets it: in BSON, a tuple is a list and a model a document.
        if not _names_simple_value(identity) and matches_everything(bson.decode(found, _LENIENT)):
            raise ValueError(f"{payload.op} of {payload.collection} needs a filter that does not match every document")
        key = _build_key(payload.collection, identity) or (payload.collection, found)
        if payload.op in _DELETES:
            if payload.data is not None:
                raise ValueError(f"{payload.op} takes no data")
            return Encoded(key, _Job(payload.collection, payload.op, found, b""), len(found))
        data = to_mapping(payload.data)
        change = _encode_document(data) if payload.op == "replace" else _encode_change(data)
        if len(found) + len(change) > MAX_STATEMENT_BYTES:
            size = len(found) + len(change)
            raise ValueError(f"filter and data of {size} bytes are more than MongoDB accepts ({MAX_STATEMENT_BYTES})")
        return Encoded(key, _Job(payload.collection, payload.op, found, change), len(found) + len(change))

    def _insert(self, payload: MongoPayload) -> Encoded:
        if payload.filter:
            raise ValueError("an insert takes no filter")
        data = payload.data if type(payload.data) is dict else to_mapping(payload.data)
        key: Hashable = None
        if "_id" not in data:
            data = {"_id": bson.ObjectId(), **data}
        else:
            identity = data["_id"]
            simple = type(identity) in _SIMPLE
            key = (payload.collection, "_id", identity) if simple else (payload.collection, _encode({"_id": identity}))
            if next(iter(data)) != "_id":
                data = {"_id": identity, **data}  # the order in which the server stores the fields
        document = _encode(data)
        return Encoded(key, _Job(payload.collection, "insert", b"", document), len(document))

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Execute the writes; adjacent writes of the same collection are sent together.

        Raises:
            RemoteError: The server is unavailable, or did not answer.
        """
        answers = Answers(batch)
        jobs: list[_Job] = [item.body for item in batch]
        try:
            for group in _group_by_collection(jobs):
                todo: Sequence[int] = group
                while indexes := answers.filter_sendable(todo):
                    todo = await self._write(jobs, indexes, answers)
        except (refused.PyMongoError, OSError) as error:
            return answers.collect(RemoteError(f"{self.section}: {self._describe(error)}"))
        return answers.collect()

    async def _write(self, jobs: Sequence[_Job], indexes: Sequence[int], answers: Answers) -> Sequence[int]:
        """Send one bulk write; return the indexes after the refused one."""
        if self._client is None:
            raise refused.ConnectionFailure("not connected")
        collection = self._client[self._settings.database][jobs[indexes[0]].collection]
        try:
            await collection.bulk_write([jobs[index].to_write() for index in indexes], ordered=True)
        except refused.BulkWriteError as error:
            return await self._handle_refusal(error, jobs, indexes, answers)
        except refused.OperationFailure as error:
            if _is_passing(error.code, error):
                raise
            for index in indexes:
                answers.refuse(index, self._build_refusal(jobs[index], self._describe(error)))
            return ()
        answers.confirm(indexes)
        return ()

    async def _handle_refusal(
        self, error: refused.BulkWriteError, jobs: Sequence[_Job], indexes: Sequence[int], answers: Answers
    ) -> Sequence[int]:
        wrong = error.details.get("writeErrors") or []
        if not wrong or error.details.get("writeConcernErrors"):
            # Written, but not with the requested write concern.
            raise error
        at, code, text = int(wrong[0]["index"]), wrong[0].get("code"), str(wrong[0].get("errmsg"))
        answers.confirm(indexes[:at])
        job = jobs[indexes[at]]
        if _is_passing(code):
            raise refused.OperationFailure(text, code)
        if code == _DUPLICATE and await self._exists(job):
            answers.confirm([indexes[at]])
        else:
            answers.refuse(indexes[at], self._build_refusal(job, mask_secrets(text, self._secrets), code))
        return indexes[at + 1 :]

    async def _exists(self, job: _Job) -> bool:
        """Return whether the same document already exists, because an earlier attempt succeeded."""
        if job.operation != "insert" or self._client is None:
            return False
        collection = self._client[self._settings.database].get_collection(job.collection, codec_options=_RAW)
        there = await collection.find_one({"_id": RawBSONDocument(job.body)["_id"]})
        return there is not None and there.raw == job.body

    def _build_refusal(self, job: _Job, text: str, code: int | None = None) -> Refusal:
        identity = shorten(str(redact({name: str(value) for name, value in job.identify().items()})))
        return Refusal(f"{job.operation} {job.collection} {identity}: {text}", False, code in (10334, 17280))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await close_within(CLOSE_SECONDS, client.close())


def _build_key(collection: str, criteria: Mapping[str, Any]) -> Hashable:
    """Return a key that payloads with the same simple filter share; None if the filter is not simple."""
    if len(criteria) != 1:
        return None
    ((name, value),) = criteria.items()
    return (collection, name, value) if type(value) in _SIMPLE else None


def _group_by_collection(jobs: Sequence[_Job]) -> Iterator[range]:
    first = 0
    for index in range(1, len(jobs) + 1):
        if index == len(jobs) or jobs[index].collection != jobs[first].collection:
            yield range(first, index)
            first = index


def _is_passing(code: int | None, error: refused.PyMongoError | None = None) -> bool:
    """Return whether a retry of the same write may succeed."""
    labels = ("RetryableWriteError", "TransientTransactionError")
    return code in _PASSING or (error is not None and any(error.has_error_label(label) for label in labels))


def _names_simple_value(criteria: Mapping[str, Any]) -> bool:
    """Return whether the filter compares a field with a simple value; it then needs no further check."""
    return any(type(value) in _SIMPLE and not name.startswith("$") for name, value in criteria.items())


def _check_collection(name: Any, database: str) -> None:
    if not isinstance(name, str) or not name or "$" in name or "\0" in name or name.startswith(("system.", ".")):
        raise ValueError(f"collection {shorten(repr(name))} is not a valid collection name")
    if name.endswith("."):
        raise ValueError(f"collection {shorten(repr(name))} ends with a dot")
    if len(f"{database}.{name}".encode()) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"collection {shorten(repr(name))} is longer than MongoDB accepts")


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        raw = bson.encode(document, codec_options=_OPTIONS)
    except (bson.errors.InvalidDocument, OverflowError, ValueError) as error:
        raise TypeError(f"data cannot be written as BSON: {error}") from None
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(raw)} bytes are more than MongoDB accepts ({MAX_DOCUMENT_BYTES})")
    return raw


def _encode_document(data: Mapping[str, Any]) -> bytes:
    """Encode a document that replaces another one."""
    if any(name.startswith("$") for name in data):
        raise ValueError("replace takes a document, not update operators")
    return _encode(data)


def _encode_change(data: Mapping[str, Any]) -> bytes:
    """Encode an update: operators as they are, plain fields as `$set`."""
    if not data:
        raise ValueError("data has no fields to set; give at least one")
    operators = [name for name in data if name.startswith("$")]
    if operators and len(operators) < len(data):
        raise ValueError("data has update operators and fields; put the fields into $set")
    return _encode(data if operators else {"$set": data})
