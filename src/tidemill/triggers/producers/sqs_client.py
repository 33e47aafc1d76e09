"""The API calls of the SQS producer; their errors say whether a retry may help.

Invariants: there are no retries here, the caller decides; every failed call raises a `SqsCallError`, whose text names
the call and the queue, with secrets masked; credentials are found the way the AWS SDK finds them, and are never stored
or shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, TidemillError, describe_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Transient errors with a status below 500.
_PASSING = ("throttl", "requestlimit", "toomanyrequests", "slowdown", "requesttimeout", "overlimit", "kms.throttl")
#: Permanent errors that occur before SQS responds.
_LASTING = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "NoRegionError",
    "ParamValidationError",
    "ProfileNotFound",
    "CredentialRetrievalError",
)
_CONNECT_SECONDS = 5.0
#: Loaders by the SDK's search path: `AWS_DATA_PATH` and its own folders.
_LOADERS: dict[tuple[str, ...], Any] = {}
#: How many seconds longer than its long poll a response may take.
_ANSWER_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class SqsSettings:
    """The SQS queue to read, and how to read it.

    Attributes:
        queue: The name or URL of the queue.
        reject_queue: The name or URL of the queue for rejected messages; '': none.
        region: The region of both queues; '': as the AWS SDK finds it.
        endpoint_url: A server to use instead of AWS, for example in tests; '': AWS.
        visibility_seconds: How long a message stays invisible to other consumers after its reader is gone.
        wait_seconds: How long a poll waits for messages.
    """

    queue: str
    reject_queue: str = ""
    region: str = ""
    endpoint_url: str = ""
    visibility_seconds: int = 60
    wait_seconds: int = 20

    def __post_init__(self) -> None:
        """Check what can be checked without SQS.

        Raises:
            ValueError: A value is out of bounds.
        """
        if not self.queue:
            raise ValueError("queue is empty; give the name or the URL of an SQS queue")
        if self.reject_queue == self.queue:
            raise ValueError(
                f"reject_queue is the queue itself ({self.queue}), so rejected messages would come back; name "
                "another queue"
            )
        if "@" in self.endpoint_url:
            raise ValueError(
                "endpoint_url contains a user or a password, which SQS does not use (requests are signed); remove it"
            )
        if not 2 <= self.visibility_seconds <= 43_200:
            raise ValueError(f"visibility_seconds must be between 2 and 43200, got {self.visibility_seconds}")
        if not 0 <= self.wait_seconds <= 20:
            raise ValueError(f"wait_seconds must be between 0 and 20, got {self.wait_seconds}")


class SqsMessage(msgspec.Struct, frozen=True):
    """One message of a queue.

    Attributes:
        queue: The name of the queue.
        message_id: The message's id in SQS, the same for every delivery.
        body: The body.
        attributes: The message attributes; binary ones as bytes.
        group_id: The message group; None if the queue is not FIFO.
        receive_count: How often the message was delivered, including this time.
        sent_ms: When the message was sent, in milliseconds since the epoch, UTC.
    """

    queue: str
    message_id: str
    body: str
    attributes: dict[str, str | bytes]
    group_id: str | None
    receive_count: int
    sent_ms: int


class SqsDelivery(msgspec.Struct, frozen=True):
    """One delivery of a message.

    Attributes:
        number: The number of the delivery in this process.
        receipt: The receipt handle.
        message: The message.
        raw_attributes: The message attributes as SQS returned them.
    """

    number: int
    receipt: str
    message: SqsMessage
    raw_attributes: dict[str, Any]


class SqsCallError(TidemillError):
    """A call to SQS failed.

    Args:
        message: The call, the queue and the error.
        passing: Whether the same call may succeed later.
        missing: Whether the queue does not exist.
    """

    def __init__(self, message: str, *, passing: bool = True, missing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
        self.missing = missing


@dataclass(frozen=True, slots=True)
class PartialFailure:
    """The deliveries of a batch call that did not succeed, by number.

    Attributes:
        refused: Permanent failures: the receipt is no longer valid.
        failed: Failures that a retry may resolve.
    """

    refused: frozenset[int]
    failed: frozenset[int]


class SqsQueue:
    """A queue.

    Args:
        client: An SQS client of aiobotocore.
        url: The URL of the queue.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self.name = url.rstrip("/").rpartition("/")[2]

    async def receive(self, limit: int, wait_seconds: int, visibility_seconds: int) -> Sequence[Mapping[str, Any]]:
        """Return the next messages in SQS's format; empty if none arrived in time."""
        async with _translate_errors("receive_message", self.name):
            answer = await self._client.receive_message(
                QueueUrl=self._url,
                MaxNumberOfMessages=limit,
                WaitTimeSeconds=wait_seconds,
                VisibilityTimeout=visibility_seconds,
                MessageSystemAttributeNames=["All"],
                MessageAttributeNames=["All"],
            )
        found: Sequence[Mapping[str, Any]] = answer.get("Messages", ())
        return found

    async def extend(self, held: Collection[SqsDelivery], visibility_seconds: int) -> PartialFailure:
        """Keep deliveries invisible for this many seconds from now; 0 returns them to the queue."""
        entries = [
            {"Id": str(one.number), "ReceiptHandle": one.receipt, "VisibilityTimeout": visibility_seconds}
            for one in held
        ]
        async with _translate_errors("change_message_visibility", self.name):
            return _read_failure(
                await self._client.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)
            )

    async def delete(self, held: Collection[SqsDelivery]) -> PartialFailure:
        entries = [{"Id": str(one.number), "ReceiptHandle": one.receipt} for one in held]
        async with _translate_errors("delete_message", self.name):
            return _read_failure(await self._client.delete_message_batch(QueueUrl=self._url, Entries=entries))

    async def send(self, held: SqsDelivery) -> None:
        """Send a copy of another queue's message, with the same body and attributes."""
        message = held.message
        extra: dict[str, Any] = {}
        if self.name.endswith(".fifo"):
            # With this id, SQS drops a second copy that is sent because the response to the first was lost.
            extra = {"MessageGroupId": message.group_id or "rejected", "MessageDeduplicationId": message.message_id}
        async with _translate_errors("send_message", self.name):
            await self._client.send_message(
                QueueUrl=self._url, MessageBody=message.body, MessageAttributes=held.raw_attributes, **extra
            )


async def open_client(stack: AsyncExitStack, settings: SqsSettings) -> Any:
    """Return an SQS client that is closed with `stack`.

    Raises:
        ConfigError: aiobotocore is not installed.
        Fault: The client cannot be created.
    """
    try:
        session, config = await asyncio.to_thread(_prepare_session, settings.wait_seconds + _ANSWER_SECONDS)
    except ModuleNotFoundError as error:
        raise ConfigError("SQS needs the package aiobotocore; install tidemill[sqs]") from error
    making = session.create_client(
        "sqs",
        region_name=settings.region or None,
        endpoint_url=settings.endpoint_url or None,
        config=config,
    )
    async with _translate_errors("create_client", settings.queue):
        return await stack.enter_async_context(making)


def _prepare_session(read_timeout_seconds: float) -> tuple[Any, Any]:
    """Return a session and its configuration; loads in advance what would block the loop for half a second."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    session = get_session()
    session.register_component("data_loader", _load_descriptions(session))
    config = AioConfig(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=read_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": 1},
    )
    return session, config


def _load_descriptions(session: Any) -> Any:
    """Return a loader with the SDK's SQS descriptions: megabytes of JSON, read once per process and search path."""
    loader = session.get_component("data_loader")
    known = _LOADERS.setdefault(tuple(loader.search_paths), loader)
    for name in ("service-2", "endpoint-rule-set-1"):
        known.load_service_model("sqs", name)
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        known.load_data(name)
    return known


async def open_queue(client: Any, queue: str) -> SqsQueue:
    """Return the queue with a name or URL.

    Raises:
        Fault: There is no queue of that name, or SQS failed.
    """
    if "://" in queue:
        return SqsQueue(client, queue)
    async with _translate_errors("get_queue_url", queue):
        answer = await client.get_queue_url(QueueName=queue)
    return SqsQueue(client, answer["QueueUrl"])


def read_delivery(queue: SqsQueue, number: int, found: Mapping[str, Any]) -> SqsDelivery:
    """Return a delivery from a message in SQS's response."""
    system = found.get("Attributes", {})
    raw = {name: _copy_attribute(one) for name, one in found.get("MessageAttributes", {}).items()}
    message = SqsMessage(
        queue=queue.name,
        message_id=found["MessageId"],
        body=found["Body"],
        attributes={name: one.get("StringValue", one.get("BinaryValue", "")) for name, one in raw.items()},
        group_id=system.get("MessageGroupId") if queue.name.endswith(".fifo") else None,
        receive_count=int(system.get("ApproximateReceiveCount", 1)),
        sent_ms=int(system.get("SentTimestamp", -1)),
    )
    return SqsDelivery(number, found["ReceiptHandle"], message, raw)


def _copy_attribute(attribute: Mapping[str, Any]) -> dict[str, Any]:
    return {name: attribute[name] for name in ("DataType", "StringValue", "BinaryValue") if name in attribute}


def _read_failure(answer: Mapping[str, Any]) -> PartialFailure:
    entries = answer.get("Failed", ())
    return PartialFailure(
        frozenset(int(one["Id"]) for one in entries if one.get("SenderFault")),
        frozenset(int(one["Id"]) for one in entries if not one.get("SenderFault")),
    )


@asynccontextmanager
async def _translate_errors(call: str, queue: str) -> AsyncIterator[None]:
    """Turn the client's exceptions into a `SqsCallError`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        passing = status >= 500 or any(word in code.lower() for word in _PASSING)
        text = redact_text(f"SQS: {call} on {queue!r} failed: {code}: {detail.get('Message', '')}")
        raise SqsCallError(
            text, passing=passing, missing="NonExistentQueue" in code or "QueueDoesNotExist" in code
        ) from None
    except (BotoCoreError, OSError, TimeoutError) as error:
        text = redact_text(f"SQS: {call} on {queue!r} failed: {describe_error(error)}")
        raise SqsCallError(text, passing=type(error).__name__ not in _LASTING) from None
