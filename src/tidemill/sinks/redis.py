"""Redis as a sink: one command per payload, or per series of payloads that only set keys; many payloads per round trip.

Invariants: commands are executed in order. A payload is confirmed only by the reply to its command. A batch is one
Redis transaction, so a temporary refusal (memory, a failover) leaves nothing of it behind, and a retry cannot overwrite
later commands. A command of the wrong kind for its key fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from redis import asyncio as aioredis
from redis import exceptions as refused
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidemill.config.redaction import find_url_secrets, mask_secrets, redact_text
from tidemill.config.sections.sink_settings import RedisSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.core.wording import shorten
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, close_within
from tidemill.sinks.payloads import RedisPayload
from tidemill.sinks.redis_commands import MAX_VALUE_BYTES, Command, build_command, describe_command

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
#: Errors after which a retry of the same command may succeed.
_PASSING = (
    refused.ConnectionError,
    refused.TimeoutError,
    refused.OutOfMemoryError,
    refused.ReadOnlyError,
    refused.TryAgainError,
    refused.ClusterDownError,
    refused.MasterDownError,
    refused.AuthenticationError,
    OSError,
)
_PASSING_WORDS = ("BUSY ", "MISCONF ", "NOREPLICAS ", "LOADING ", "OOM ")


class RedisSink(Sink):
    """One `sinks.redis.<name>`.

    Args:
        name: The instance's name.
        settings: The instance's section.
    """

    type: ClassVar[str] = "redis"
    max_batch_count = 1_000
    max_batch_bytes = 4 * 1024 * 1024

    def __init__(self, name: str, settings: RedisSinkSettings) -> None:
        super().__init__(name)
        self._url = settings.url
        self._prefix = settings.key_prefix.encode()
        self._scripts = {name: text.encode() for name, text in settings.scripts.items()}
        self._secrets = find_url_secrets(settings.url)
        self._client: aioredis.Redis | None = None
        # Set once a command for several keys was refused, because perhaps only one of them is at fault.
        self._one_each = False

    async def connect(self) -> None:
        """Connect, and check that the server answers.

        Raises:
            ConfigError: The URL is wrong, or the server does not know the user.
            RemoteError: The server does not answer.
        """
        where = redact_text(self._url)
        try:
            client = aioredis.Redis.from_url(
                self._url,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_keepalive=True,
                # The delivery decides how long a batch may take.
                socket_timeout=None,
                # A retry by the client itself would execute commands twice.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"{self.section}: {where}: {self._describe(error)}; correct url") from None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await client.ping()
        except refused.AuthenticationError as error:
            await close_within(CLOSE_SECONDS, client.aclose())
            raise ConfigError(f"{self.section}: {where}: {self._describe(error)}; correct url") from None
        except (refused.RedisError, OSError) as error:
            await close_within(CLOSE_SECONDS, client.aclose())
            said = self._describe(error).rstrip(".")
            raise RemoteError(f"{self.section}: {where}: {said}; {CHECK} url") from None
        self._client = client

    def _describe(self, error: BaseException) -> str:
        # The client puts the command, with its data, before the server's message.
        kind, _, text = describe_error(error).partition(": ")
        return mask_secrets(f"{kind}: {text.rpartition(' caused error: ')[2]}", self._secrets)

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: RedisPayload) -> Encoded:
        """Return the command, with its arguments as bytes.

        Raises:
            TypeError: `data` has a type that the operation does not accept.
            ValueError: The operation or the script is unknown, `data` is empty, or text cannot be encoded as UTF-8.
        """
        if not isinstance(payload.key, (str, bytes)) or not payload.key:
            raise ValueError(f"key must be a non-empty string or bytes, got {shorten(repr(payload.key))}")
        key = self._prefix + (payload.key.encode() if isinstance(payload.key, str) else payload.key)
        command = build_command(payload, key, self._scripts, self.to_json)
        size = sum(len(each) for each in command)
        if size > MAX_VALUE_BYTES:
            raise ValueError(f"{size} bytes are more than Redis accepts ({MAX_VALUE_BYTES})")
        return Encoded(key, command, size)

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Execute the commands.

        Raises:
            RemoteError: The server is unavailable; nothing was executed, unless the connection broke before the reply.
        """
        answers = Answers(batch)
        todo: Sequence[int] = range(len(batch))
        try:
            while indexes := answers.filter_sendable(todo):
                todo = await self._execute(indexes, batch, answers)
        except (refused.RedisError, OSError) as error:
            await self._drop_connections()
            return answers.collect(RemoteError(f"{self.section}: {self._describe(error)}"))
        except BaseException:
            # A reply may still arrive; the next command must not read it as its own.
            await self._drop_connections()
            raise
        return answers.collect()

    async def _drop_connections(self) -> None:
        if self._client is not None:
            await close_within(CLOSE_SECONDS, self._client.connection_pool.disconnect())

    async def _execute(self, indexes: Sequence[int], batch: Sequence[Encoded], answers: Answers) -> Sequence[int]:
        """Send one transaction; return the indexes to send again because another command of it was refused."""
        groups = [[index] for index in indexes] if self._one_each else _group_sets(indexes, batch)
        replies = await self._send_transaction([_join([batch[index].body for index in group]) for group in groups])
        begun, queued, done = replies[0], replies[1:-1], replies[-1]
        if not isinstance(begun, Exception) and isinstance(done, list):
            self._record_replies(groups, batch, done, answers)
            return ()
        if isinstance(begun, Exception) and not _is_passing(begun):
            raise begun
        if isinstance(begun, Exception):
            # The server may have recovered after refusing MULTI; it then executed each command by itself.
            self._record_replies(groups, batch, queued, answers)
            return ()
        errors = [reply for reply in queued if isinstance(reply, Exception)]
        first = next((error for error in errors if _is_passing(error)), None)
        if first is not None or not errors:
            raise first or (done if isinstance(done, Exception) else refused.RedisError(f"EXEC answered {done!r}"))
        wrong = [group for group, reply in zip(groups, queued, strict=True) if isinstance(reply, Exception)]
        if any(len(group) > 1 for group in wrong):
            self._one_each = True
            return indexes
        self._record_replies(wrong, batch, errors, answers)
        return [index for index in indexes if [index] not in wrong]

    async def _send_transaction(self, commands: Sequence[Command]) -> list[Any]:
        if self._client is None:
            raise RemoteError(f"{self.section} is not connected")
        # Built by hand: the client's own transaction reports only the first command that failed.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("MULTI")
        for command in commands:
            pipeline.execute_command(*command)
        pipeline.execute_command("EXEC")
        return await pipeline.execute(raise_on_error=False)

    def _record_replies(
        self, groups: Sequence[Sequence[int]], batch: Sequence[Encoded], replies: Sequence[Any], answers: Answers
    ) -> None:
        for group, reply in zip(groups, replies, strict=True):
            if not isinstance(reply, Exception):
                answers.confirm(group)
                continue
            together = len(group) > 1
            self._one_each = self._one_each or together
            for index in group:
                name = shorten(bytes(batch[index].key).decode(errors="replace"))
                text = f"{describe_command(batch[index].body)} {name}: {self._describe(reply)}"
                answers.refuse(index, Refusal(text, together or _is_passing(reply)))

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await close_within(CLOSE_SECONDS, client.aclose())


def _is_passing(error: BaseException) -> bool:
    """Return whether a retry of the same command may succeed."""
    text = str(error).rpartition(" caused error: ")[2]
    return isinstance(error, _PASSING) or text.startswith(_PASSING_WORDS)


def _group_sets(indexes: Sequence[int], batch: Sequence[Encoded]) -> list[list[int]]:
    """Group adjacent payloads that only set keys, so that one command sets them all."""
    groups: list[list[int]] = []
    setting = False
    for index in indexes:
        body = batch[index].body
        sets = body[0] == b"SET" and len(body) == 3
        if sets and setting:
            groups[-1].append(index)
        else:
            groups.append([index])
        setting = sets
    return groups


def _join(commands: Sequence[Command]) -> Command:
    """Merge commands that set one key each into one command; for the same key, the last one wins."""
    if len(commands) == 1:
        return commands[0]
    joined = [b"MSET"]
    for command in commands:
        joined += command[1:]
    return joined
