"""MongoDB as a sink: ordered bulk writes, one write per payload.

Invariants: writes are carried out in order; a document that is refused is named, and only those after it are sent
again; no filter finds any document whatever. Inserts have their `_id` before they are sent, so that one that is
repeated after a broken connection is recognised.
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
from tidemill.config.sink_settings import MongoSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, closed_in, plain, shortened
from tidemill.sinks.mongo_filter import finds_anything
from tidemill.sinks.payloads import MongoPayload

#: Finding a server may take this long, unless the URI says otherwise.
SELECTION_MILLISECONDS = 5_000
CLOSE_SECONDS = 5.0
#: The server takes no larger documents.
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
#: And no larger statements: filter and change together, and what the client puts around them.
MAX_STATEMENT_BYTES = MAX_DOCUMENT_BYTES + 16 * 1024 - 1024
#: Database and collection together, with the dot between them.
MAX_NAMESPACE_BYTES = 255
#: Names that were checked; forgotten together when there are too many.
MAX_KNOWN_COLLECTIONS = 1_000
_DUPLICATE = 11_000
_UNKNOWN_USER = 18
#: The server's codes when the same may work later: network, elections, shutdown, time limits, conflicts, resources,
#: logins that somebody is changing.
_PASSING = frozenset(
    {6, 7, 18, 24, 43, 50, 64, 89, 91, 112, 133, 134, 146, 189, 202, 237, 251, 262, 317, 9001}
    | {10058, 10107, 11600, 11601, 11602, 13388, 13435, 13436, 14031}
)
_SIMPLE = frozenset({str, int, bytes, bson.ObjectId})


def _form(value: Any) -> Any:
    """Return a value that BSON knows for one that it does not."""
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
    raise TypeError(f"data has a {type(value).__name__}, which has no BSON form")


_OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(
    type_registry=TypeRegistry(fallback_encoder=_form), uuid_representation=bson.binary.UuidRepresentation.STANDARD
)
_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
#: Takes every date that can be encoded.
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
#: What takes no data, the documents it finds being deleted.
_DELETES = frozenset({"delete", "delete_many"})
_OPERATIONS = ("insert", "upsert", "update", "update_many", "replace", "delete", "delete_many")


class _Job(msgspec.Struct, frozen=True, gc=False):
    """One write.

    Attributes:
        collection: Where.
        operation: What is done.
        found: The filter as BSON; b'' for an insert.
        body: The document or the change as BSON; b'' for a delete.
    """

    collection: str
    operation: str
    found: bytes
    body: bytes

    def write(self) -> Write:
        """Return what the client takes."""
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

    def identity(self) -> Mapping[str, Any]:
        """Return what identifies its document."""
        if self.operation == "insert":
            return {"_id": bson.decode(self.body, _LENIENT)["_id"]}
        return bson.decode(self.found, _LENIENT)


class MongoSink(Sink):
    """One `sinks.mongo.<name>`.

    Args:
        name: The instance's name.
        settings: Its section.
    """

    type: ClassVar[str] = "mongo"
    max_batch_count = 1_000
    max_batch_bytes = 8 * 1024 * 1024

    def __init__(self, name: str, settings: MongoSinkSettings) -> None:
        """Prepare; nothing is connected before `connect`."""
        super().__init__(name)
        self._settings = settings
        self._secrets = find_url_secrets(settings.uri)
        self._collections: set[str] = set()
        self._client: AsyncMongoClient[Any] | None = None

    async def connect(self) -> None:
        """Connect, and ask the server for an answer.

        Raises:
            ConfigError: The URI is wrong, asks for writes without confirmation, or the server does not know the user.
            RemoteError: The server does not answer.
        """
        where = redact_text(self._settings.uri)
        options: dict[str, Any] = {}
        if "serverselectiontimeoutms" not in self._settings.uri.lower():
            options["serverSelectionTimeoutMS"] = SELECTION_MILLISECONDS
        try:
            client: AsyncMongoClient[Any] = AsyncMongoClient(self._settings.uri, **options)
        except (refused.PyMongoError, ValueError) as error:
            raise ConfigError(f"{self.place}: {where}: {self._text(error)}; correct uri") from None
        if not client.write_concern.acknowledged:
            raise ConfigError(f"{self.place}: {where}: w=0 asks for writes that nobody confirms; remove it from uri")
        try:
            await client.admin.command("ping")
        except refused.OperationFailure as error:
            await closed_in(CLOSE_SECONDS, client.close())
            kind = ConfigError if error.code == _UNKNOWN_USER else RemoteError
            raise kind(f"{self.place}: {where}: {self._text(error)}; correct uri") from None
        except refused.PyMongoError as error:
            await closed_in(CLOSE_SECONDS, client.close())
            raise RemoteError(f"{self.place}: {where}: {self._text(error)}; {CHECK} uri") from None
        except BaseException:
            await closed_in(CLOSE_SECONDS, client.close())
            raise
        self._client = client

    def _text(self, error: BaseException) -> str:
        # Behind it the client says everything that it knows about all servers.
        return mask_secrets(
            describe_error(error).partition(", Timeout: ")[0].partition(", full error: ")[0], self._secrets
        )

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: MongoPayload) -> Encoded:
        """Return the write, in its wire form.

        Raises:
            TypeError: `data` is no mapping, or has a value without a BSON form.
            ValueError: The parts of the payload do not fit each other, or the filter finds any document.
        """
        if payload.collection not in self._collections:
            _check_collection(payload.collection, self._settings.database)
            if len(self._collections) >= MAX_KNOWN_COLLECTIONS:
                self._collections.clear()
            self._collections.add(payload.collection)
        if payload.op == "insert":
            return self._insert(payload)
        if payload.op not in _OPERATIONS:
            raise ValueError(f"op {shortened(repr(payload.op))} is not known; there is {', '.join(_OPERATIONS)}")
        identity = payload.filter
        if not isinstance(identity, Mapping):
            raise TypeError(f"{payload.op} of {payload.collection} needs a filter: fields and what they have to be")
        found = _encoded(identity)
        # What the server gets is judged: a tuple is a list there, and a model a document.
        if not _plainly_names(identity) and finds_anything(bson.decode(found, _LENIENT)):
            raise ValueError(f"{payload.op} of {payload.collection} needs a filter that does not find any document")
        key = _key(payload.collection, identity) or (payload.collection, found)
        if payload.op in _DELETES:
            if payload.data is not None:
                raise ValueError(f"{payload.op} takes no data")
            return Encoded(key, _Job(payload.collection, payload.op, found, b""), len(found))
        data = plain(payload.data)
        change = _document(data) if payload.op == "replace" else _change(data)
        if len(found) + len(change) > MAX_STATEMENT_BYTES:
            size = len(found) + len(change)
            raise ValueError(f"filter and data of {size} bytes are more than MongoDB takes ({MAX_STATEMENT_BYTES})")
        return Encoded(key, _Job(payload.collection, payload.op, found, change), len(found) + len(change))

    def _insert(self, payload: MongoPayload) -> Encoded:
        if payload.filter:
            raise ValueError("an insert takes no filter")
        data = payload.data if type(payload.data) is dict else plain(payload.data)
        key: Hashable = None
        if "_id" not in data:
            data = {"_id": bson.ObjectId(), **data}
        else:
            identity = data["_id"]
            simple = type(identity) in _SIMPLE
            key = (payload.collection, "_id", identity) if simple else (payload.collection, _encoded({"_id": identity}))
            if next(iter(data)) != "_id":
                data = {"_id": identity, **data}  # as the server keeps it
        document = _encoded(data)
        return Encoded(key, _Job(payload.collection, "insert", b"", document), len(document))

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Carry the writes out, those of one collection that are adjacent together.

        Raises:
            RemoteError: The server cannot do it now, or its answer did not come.
        """
        answers = Answers(batch)
        jobs: list[_Job] = [item.body for item in batch]
        try:
            for group in _groups(jobs):
                todo: Sequence[int] = group
                while indexes := answers.still(todo):
                    todo = await self._write(jobs, indexes, answers)
        except (refused.PyMongoError, OSError) as error:
            return answers.all(RemoteError(f"{self.place}: {self._text(error)}"))
        return answers.all()

    async def _write(self, jobs: Sequence[_Job], indexes: Sequence[int], answers: Answers) -> Sequence[int]:
        """Send one bulk write; return those after the one that was refused."""
        if self._client is None:
            raise refused.ConnectionFailure("not connected")
        collection = self._client[self._settings.database][jobs[indexes[0]].collection]
        try:
            await collection.bulk_write([jobs[index].write() for index in indexes], ordered=True)
        except refused.BulkWriteError as error:
            return await self._after_refusal(error, jobs, indexes, answers)
        except refused.OperationFailure as error:
            if _passing(error.code, error):
                raise
            for index in indexes:
                answers.refuse(index, self._refusal(jobs[index], self._text(error)))
            return ()
        answers.confirm(indexes)
        return ()

    async def _after_refusal(
        self, error: refused.BulkWriteError, jobs: Sequence[_Job], indexes: Sequence[int], answers: Answers
    ) -> Sequence[int]:
        wrong = error.details.get("writeErrors") or []
        if not wrong or error.details.get("writeConcernErrors"):
            # Written, but not as safely as was asked for.
            raise error
        at, code, text = int(wrong[0]["index"]), wrong[0].get("code"), str(wrong[0].get("errmsg"))
        answers.confirm(indexes[:at])
        job = jobs[indexes[at]]
        if _passing(code):
            raise refused.OperationFailure(text, code)
        if code == _DUPLICATE and await self._is_there(job):
            answers.confirm([indexes[at]])
        else:
            answers.refuse(indexes[at], self._refusal(job, mask_secrets(text, self._secrets), code))
        return indexes[at + 1 :]

    async def _is_there(self, job: _Job) -> bool:
        """Tell whether the very document that could not be inserted is there: an earlier try came through."""
        if job.operation != "insert" or self._client is None:
            return False
        collection = self._client[self._settings.database].get_collection(job.collection, codec_options=_RAW)
        there = await collection.find_one({"_id": RawBSONDocument(job.body)["_id"]})
        return there is not None and there.raw == job.body

    def _refusal(self, job: _Job, text: str, code: int | None = None) -> Refusal:
        identity = shortened(str(redact({name: str(value) for name, value in job.identity().items()})))
        return Refusal(f"{job.operation} {job.collection} {identity}: {text}", False, code in (10334, 17280))

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            await closed_in(CLOSE_SECONDS, client.close())


def _key(collection: str, criteria: Mapping[str, Any]) -> Hashable:
    """Return what is the same for payloads that look for the same simple value; None where it is not simple."""
    if len(criteria) != 1:
        return None
    ((name, value),) = criteria.items()
    return (collection, name, value) if type(value) in _SIMPLE else None


def _groups(jobs: Sequence[_Job]) -> Iterator[range]:
    first = 0
    for index in range(1, len(jobs) + 1):
        if index == len(jobs) or jobs[index].collection != jobs[first].collection:
            yield range(first, index)
            first = index


def _passing(code: int | None, error: refused.PyMongoError | None = None) -> bool:
    """Tell whether the same may work later."""
    labels = ("RetryableWriteError", "TransientTransactionError")
    return code in _PASSING or (error is not None and any(error.has_error_label(label) for label in labels))


def _plainly_names(criteria: Mapping[str, Any]) -> bool:
    """Tell whether a field has to have a simple value: nothing more has to be looked at then."""
    return any(type(value) in _SIMPLE and not name.startswith("$") for name, value in criteria.items())


def _check_collection(name: Any, database: str) -> None:
    if not isinstance(name, str) or not name or "$" in name or "\0" in name or name.startswith(("system.", ".")):
        raise ValueError(f"collection {shortened(repr(name))} is no name of a collection")
    if name.endswith("."):
        raise ValueError(f"collection {shortened(repr(name))} ends with a dot")
    if len(f"{database}.{name}".encode()) > MAX_NAMESPACE_BYTES:
        raise ValueError(f"collection {shortened(repr(name))} is longer than MongoDB takes")


def _encoded(document: Mapping[str, Any]) -> bytes:
    try:
        raw = bson.encode(document, codec_options=_OPTIONS)
    except (bson.errors.InvalidDocument, OverflowError, ValueError) as error:
        raise TypeError(f"data has no BSON form: {error}") from None
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(raw)} bytes are more than MongoDB takes ({MAX_DOCUMENT_BYTES})")
    return raw


def _document(data: Mapping[str, Any]) -> bytes:
    """Return the document that takes another's place."""
    if any(name.startswith("$") for name in data):
        raise ValueError("replace takes a document, not update operators")
    return _encoded(data)


def _change(data: Mapping[str, Any]) -> bytes:
    """Return the update: operators as they are, fields to be set."""
    if not data:
        raise ValueError("data has no field to set")
    operators = [name for name in data if name.startswith("$")]
    if operators and len(operators) < len(data):
        raise ValueError("data has update operators and fields; put the fields into $set")
    return _encoded(data if operators else {"$set": data})
