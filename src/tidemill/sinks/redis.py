"""Redis as a sink: one command per payload, or for adjacent ones that only set a key; many payloads per round trip.

Invariants: commands are carried out in order; a payload is confirmed only by the answer to its command. A batch is
one transaction of Redis, so that what the server refuses for now (memory, a failover) leaves nothing of it behind, and
trying again cannot overtake what came later; commands of the wrong kind for their key fail alone.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from redis import asyncio as aioredis
from redis import exceptions as refused
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidemill.config.redaction import redact_text, url_secrets, without
from tidemill.config.sink_settings import RedisSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, said
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, closed_in, plain, shortened, to_json
from tidemill.sinks.payloads import RedisPayload

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
#: Lets a key end only if the command before worked: a key of another kind must not lose its life to a refusal.
_WITH_TTL = (
    "local r = redis.pcall(ARGV[2], KEYS[1], unpack(ARGV, 3)) if type(r) == 'table' and r.err then return r end "
    "redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 1"
)
#: Redis stores no longer values.
MAX_VALUE_BYTES = 512 * 1024 * 1024

Argument = bytes | str | int | float


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
        self._secrets = url_secrets(settings.url)
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
        kind, _, text = said(error).partition(": ")
        return without(f"{kind}: {text.rpartition(' caused error: ')[2]}", self._secrets)

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: RedisPayload) -> Encoded:
        """Return the command.

        Raises:
            TypeError: `data` is not what the operation takes.
            ValueError: The operation is not known, or there is nothing in `data`.
        """
        make = _OPERATIONS.get(payload.op)
        if make is None:
            raise ValueError(f"op {payload.op!r} is not known; there is {', '.join(_OPERATIONS)}")
        if not isinstance(payload.key, (str, bytes)) or not payload.key:
            raise ValueError(f"key {payload.key!r} is no text and no bytes, or empty")
        key = self._prefix + (payload.key.encode() if isinstance(payload.key, str) else payload.key)
        command = make(key, payload.data)
        if payload.ttl is not None:
            command = _ending(command, _milliseconds(payload.ttl))
        size = sum(len(each) if isinstance(each, (bytes, str)) else 8 for each in command)
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

    async def _replies(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
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
                text = f"{_operation(batch[index].body)} {name}: {self._text(reply)}"
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
        sets = body[0] == "SET" and len(body) == 3
        if sets and setting:
            groups[-1].append(index)
        else:
            groups.append([index])
        setting = sets
    return groups


def _joined(commands: Sequence[tuple[Argument, ...]]) -> Sequence[Argument]:
    """Return one command for several that set a key each; of one key, the last one counts."""
    if len(commands) == 1:
        return commands[0]
    joined: list[Argument] = ["MSET"]
    for command in commands:
        joined += command[1:]
    return joined


def _operation(command: Sequence[Argument]) -> str:
    return str(command[5] if command[0] == "EVAL" else command[0])


def _milliseconds(ttl: Any) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < 1e11:
        raise ValueError(f"ttl {ttl!r} is no number of seconds above 0")
    return max(1, round(ttl * 1000))


def _ending(command: tuple[Argument, ...], milliseconds: int) -> tuple[Argument, ...]:
    name, key, *rest = command
    if name == "DEL":
        raise ValueError("a key that is deleted has no ttl")
    if name == "SET":
        return (*command, "PX", milliseconds)
    return ("EVAL", _WITH_TTL, 1, key, milliseconds, name, *rest)


# -- the operations ---------------------------------------------------------------------------------------------


def _set(key: bytes, data: Any) -> tuple[Argument, ...]:
    return ("SET", key, to_json(data))


def _delete(key: bytes, data: Any) -> tuple[Argument, ...]:
    if data is not None:
        raise TypeError("delete takes no data")
    return ("DEL", key)


def _incrby(key: bytes, data: Any) -> tuple[Argument, ...]:
    if isinstance(data, bool) or not isinstance(data, int):
        raise TypeError(f"incrby takes a whole number, not {type(data).__name__}")
    return ("INCRBY", key, data)


def _elements(command: str, key: bytes, data: Any) -> tuple[Argument, ...]:
    elements = [to_json(each) for each in data] if isinstance(data, (list, tuple, set, frozenset)) else [to_json(data)]
    if not elements:
        raise ValueError("an empty list has nothing to add")
    return (command, key, *elements)


def _fields(command: tuple[Argument, ...], data: Any) -> tuple[Argument, ...]:
    fields: list[Argument] = []
    for name, value in plain(data).items():
        simple = isinstance(value, (str, bytes, int, float)) and not isinstance(value, bool)
        # Texts that are enumerations print as their names.
        fields += (name, (str.__str__(value) if isinstance(value, str) else value) if simple else to_json(value))
    if not fields:
        raise ValueError("data has no field")
    return (*command, *fields)


def _zadd(key: bytes, data: Any) -> tuple[Argument, ...]:
    if not isinstance(data, Mapping) or not data:
        raise TypeError("zadd takes a dict of member and score")
    pairs: list[Argument] = []
    for member, score in data.items():
        if isinstance(score, bool) or not isinstance(score, (int, float)) or math.isnan(score):
            raise TypeError(f"the score of {member!r} is no number")
        if not isinstance(member, (str, bytes)):
            raise TypeError(f"member {member!r} is no text and no bytes")
        pairs += (score, member)
    return ("ZADD", key, *pairs)


def _stream(key: bytes, data: Any) -> tuple[Argument, ...]:
    return _fields(("XADD", key, "*"), data)


def _hset(key: bytes, data: Any) -> tuple[Argument, ...]:
    return _fields(("HSET", key), data)


_OPERATIONS: Mapping[str, Callable[[bytes, Any], tuple[Argument, ...]]] = {
    "set": _set,
    "delete": _delete,
    "incrby": _incrby,
    "hset": _hset,
    "push": functools.partial(_elements, "RPUSH"),
    "sadd": functools.partial(_elements, "SADD"),
    "zadd": _zadd,
    "stream": _stream,
}
