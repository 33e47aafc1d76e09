"""Redis as a sink: one command per payload, or for adjacent ones that only set a key; many payloads per round trip.

Invariants: commands are carried out in order; a payload is confirmed only by the answer to its command. A batch is
one transaction of Redis, so that what the server refuses for now (memory, a failover) leaves nothing of it behind, and
trying again cannot overtake what came later; commands of the wrong kind for their key fail alone.
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
from tidemill.config.sink_settings import RedisSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, closed_in, shortened
from tidemill.sinks.payloads import RedisPayload
from tidemill.sinks.redis_commands import MAX_VALUE_BYTES, Command, command_of, operation_of

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
#: What the server says when the same may work later.
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
        settings: Its section.
    """

    type: ClassVar[str] = "redis"
    max_batch_count = 1_000
    max_batch_bytes = 4 * 1024 * 1024

    def __init__(self, name: str, settings: RedisSinkSettings) -> None:
        """Prepare; nothing is connected before `connect`."""
        super().__init__(name)
        self._url = settings.url
        self._prefix = settings.key_prefix.encode()
        self._scripts = {name: text.encode() for name, text in settings.scripts.items()}
        self._secrets = find_url_secrets(settings.url)
        self._client: aioredis.Redis | None = None
        # Set once a command for several keys was refused: what is wrong with it may be wrong with one of them only.
        self._one_each = False

    async def connect(self) -> None:
        """Connect, and ask the server for an answer.

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
                # How long a batch may take is the delivery's to say.
                socket_timeout=None,
                # A second try of the client's own would carry commands out twice.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"{self.place}: {where}: {self._text(error)}; correct url") from None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await client.ping()
        except refused.AuthenticationError as error:
            await closed_in(CLOSE_SECONDS, client.aclose())
            raise ConfigError(f"{self.place}: {where}: {self._text(error)}; correct url") from None
        except (refused.RedisError, OSError) as error:
            await closed_in(CLOSE_SECONDS, client.aclose())
            raise RemoteError(f"{self.place}: {where}: {self._text(error)}; {CHECK} url") from None
        self._client = client

    def _text(self, error: BaseException) -> str:
        # The client puts the command, data included, before what the server said.
        kind, _, text = describe_error(error).partition(": ")
        return mask_secrets(f"{kind}: {text.rpartition(' caused error: ')[2]}", self._secrets)

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: RedisPayload) -> Encoded:
        """Return the command, its arguments as bytes.

        Raises:
            TypeError: `data` is not what the operation takes.
            ValueError: The operation or the script is not known, there is nothing in `data`, or text has no UTF-8.
        """
        if not isinstance(payload.key, (str, bytes)) or not payload.key:
            raise ValueError(f"key {shortened(repr(payload.key))} is no text and no bytes, or empty")
        key = self._prefix + (payload.key.encode() if isinstance(payload.key, str) else payload.key)
        command = command_of(payload, key, self._scripts)
        size = sum(len(each) for each in command)
        if size > MAX_VALUE_BYTES:
            raise ValueError(f"{size} bytes are more than Redis takes ({MAX_VALUE_BYTES})")
        return Encoded(key, command, size)

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Carry the commands out.

        Raises:
            RemoteError: The server cannot do it now; nothing was done, unless the connection broke before its answer.
        """
        answers = Answers(batch)
        todo: Sequence[int] = range(len(batch))
        try:
            while indexes := answers.still(todo):
                todo = await self._carry_out(indexes, batch, answers)
        except (refused.RedisError, OSError) as error:
            await self._forget_connections()
            return answers.all(RemoteError(f"{self.place}: {self._text(error)}"))
        except BaseException:
            # An answer may still come: it must not be taken for that of the next command.
            await self._forget_connections()
            raise
        return answers.all()

    async def _forget_connections(self) -> None:
        if self._client is not None:
            await closed_in(CLOSE_SECONDS, self._client.connection_pool.disconnect())

    async def _carry_out(self, indexes: Sequence[int], batch: Sequence[Encoded], answers: Answers) -> Sequence[int]:
        """Send one transaction; return what is to be sent again because another command of it was refused."""
        groups = [[index] for index in indexes] if self._one_each else _groups(indexes, batch)
        replies = await self._replies([_joined([batch[index].body for index in group]) for group in groups])
        begun, queued, done = replies[0], replies[1:-1], replies[-1]
        if not isinstance(begun, Exception) and isinstance(done, list):
            self._note(groups, batch, done, answers)
            return ()
        if isinstance(begun, Exception) and not _passing(begun):
            raise begun
        if isinstance(begun, Exception):
            # It may have become able to answer in between: then each command stands for itself.
            self._note(groups, batch, queued, answers)
            return ()
        errors = [reply for reply in queued if isinstance(reply, Exception)]
        first = next((error for error in errors if _passing(error)), None)
        if first is not None or not errors:
            raise first or (done if isinstance(done, Exception) else refused.RedisError(f"EXEC answered {done!r}"))
        wrong = [group for group, reply in zip(groups, queued, strict=True) if isinstance(reply, Exception)]
        if any(len(group) > 1 for group in wrong):
            self._one_each = True
            return indexes
        self._note(wrong, batch, errors, answers)
        return [index for index in indexes if [index] not in wrong]

    async def _replies(self, commands: Sequence[Command]) -> list[Any]:
        if self._client is None:
            raise RemoteError(f"{self.place} is not connected")
        # Made by hand: the client's own transaction says only which command failed first.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("MULTI")
        for command in commands:
            pipeline.execute_command(*command)
        pipeline.execute_command("EXEC")
        return await pipeline.execute(raise_on_error=False)

    def _note(
        self, groups: Sequence[Sequence[int]], batch: Sequence[Encoded], replies: Sequence[Any], answers: Answers
    ) -> None:
        for group, reply in zip(groups, replies, strict=True):
            if not isinstance(reply, Exception):
                answers.confirm(group)
                continue
            together = len(group) > 1
            self._one_each = self._one_each or together
            for index in group:
                name = shortened(bytes(batch[index].key).decode(errors="replace"))
                text = f"{operation_of(batch[index].body)} {name}: {self._text(reply)}"
                answers.refuse(index, Refusal(text, together or _passing(reply)))

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            await closed_in(CLOSE_SECONDS, client.aclose())


def _passing(error: BaseException) -> bool:
    """Tell whether the same may work later."""
    text = str(error).rpartition(" caused error: ")[2]
    return isinstance(error, _PASSING) or text.startswith(_PASSING_WORDS)


def _groups(indexes: Sequence[int], batch: Sequence[Encoded]) -> list[list[int]]:
    """Put adjacent payloads that only set keys together: one command sets them all."""
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


def _joined(commands: Sequence[Command]) -> Command:
    """Return one command for several that set a key each; of one key, the last one counts."""
    if len(commands) == 1:
        return commands[0]
    joined = [b"MSET"]
    for command in commands:
        joined += command[1:]
    return joined
