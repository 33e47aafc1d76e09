"""Builds Redis commands from payloads. Arguments are the bytes to send, so a value that cannot be encoded fails here.

Invariant: a command changes one key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.core.wording import shorten
from tidemill.sinks.base import to_mapping
from tidemill.sinks.payloads import RedisPayload

#: Redis does not store longer values.
MAX_VALUE_BYTES = 512 * 1024 * 1024
#: Sets the expiry only if the command itself succeeded: a refused command must not make a key expire.
_WITH_TTL = (
    b"local r = redis.pcall(ARGV[2], KEYS[1], unpack(ARGV, 3)) if type(r) == 'table' and r.err then return r end "
    b"redis.call('PEXPIRE', KEYS[1], ARGV[1]) return 1"
)
#: How many arguments fit into a Lua call.
MAX_ARGUMENTS_WITH_TTL = 7_000

Command = Sequence[bytes]
#: Encodes data as JSON.
ToJson = Callable[[Any], bytes]


def build_command(payload: RedisPayload, key: bytes, scripts: Mapping[str, bytes], to_json: ToJson) -> Command:
    """Return the command of a payload.

    Args:
        payload: The payload.
        key: The key on the server, with the sink's prefix.
        scripts: The texts of the scripts by name.
        to_json: Encodes data as JSON.

    Raises:
        TypeError: `data` has a type that the operation does not accept.
        ValueError: The operation or the script is unknown, `data` is empty, or text cannot be encoded as UTF-8.
    """
    if payload.op == "script":
        return _script(payload, key, scripts, to_json)
    if payload.script:
        raise ValueError(f"{payload.op} takes no script; use op='script' to run one")
    if payload.op == "expire":
        return _expire(payload, key)
    build = _OPERATIONS.get(payload.op) if isinstance(payload.op, str) else None
    if build is None:
        known = ", ".join([*_OPERATIONS, "expire", "script"])
        raise ValueError(f"unknown op {shorten(repr(payload.op))}; use one of {known}")
    command = build(key, payload.data, to_json)
    return command if payload.ttl is None else _add_ttl(command, _to_milliseconds(payload.ttl))


def describe_command(command: Command) -> str:
    """Return the name of a command's operation, for messages."""
    if command[0] != b"EVAL":
        return command[0].decode()
    return command[5].decode() if command[1] == _WITH_TTL else "script"


def _to_milliseconds(ttl: Any) -> bytes:
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < 1e11:
        raise ValueError(f"ttl {shorten(repr(ttl))} is not a number of seconds above 0")
    return b"%d" % max(1, round(ttl * 1000))


def _add_ttl(command: Command, milliseconds: bytes) -> Command:
    name, key, *rest = command
    if name == b"DEL":
        raise ValueError("delete takes no ttl")
    if name == b"SET":
        return (*command, b"PX", milliseconds)
    if len(rest) > MAX_ARGUMENTS_WITH_TTL:
        raise ValueError(f"with a ttl, {len(rest)} arguments are too many ({MAX_ARGUMENTS_WITH_TTL}); use op='expire'")
    return (b"EVAL", _WITH_TTL, b"1", key, milliseconds, name, *rest)


def _expire(payload: RedisPayload, key: bytes) -> Command:
    if payload.data is not None:
        raise TypeError("expire takes no data")
    if payload.ttl is None:
        raise ValueError("expire needs a ttl, in seconds")
    return (b"PEXPIRE", key, _to_milliseconds(payload.ttl))


def _script(payload: RedisPayload, key: bytes, scripts: Mapping[str, bytes], to_json: ToJson) -> Command:
    text = scripts.get(payload.script) if isinstance(payload.script, str) else None
    if text is None:
        known = ", ".join(scripts) or "none"
        raise ValueError(f"script {shorten(repr(payload.script))} is not configured in scripts; configured: {known}")
    if payload.ttl is not None:
        raise ValueError("a script takes no ttl; pass it as an argument")
    data = payload.data
    if data is None:
        data = ()
    elif not isinstance(data, (list, tuple)):
        raise TypeError(f"a script takes a list of arguments, not {type(data).__name__}")
    return (b"EVAL", text, b"1", key, *(_encode_value(each, to_json) for each in data))


# -- the operations ---------------------------------------------------------------------------------------------


def _encode_value(value: Any, to_json: ToJson) -> bytes:
    """Encode a value: text, bytes and numbers as they are, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return str.__str__(value).encode()  # members of text enumerations print their names
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value).encode()
    return float.__repr__(value).encode() if isinstance(value, float) else to_json(value)


def _encode_name(value: Any) -> bytes:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"{shorten(repr(value))} is neither text nor bytes")
    return value if isinstance(value, bytes) else value.encode()


def _to_list(data: Any) -> Sequence[Any]:
    elements = list(data) if isinstance(data, (list, tuple, set, frozenset)) else [data]
    if not elements:
        raise ValueError("the list is empty; give at least one element")
    return elements


def _set(key: bytes, data: Any, to_json: ToJson) -> Command:
    return (b"SET", key, to_json(data))


def _delete(key: bytes, data: Any, _: ToJson) -> Command:
    if data is not None:
        raise TypeError("delete takes no data")
    return (b"DEL", key)


def _incrby(key: bytes, data: Any, _: ToJson) -> Command:
    if isinstance(data, bool) or not isinstance(data, int):
        raise TypeError(f"incrby takes a whole number, not {type(data).__name__}")
    if not -(1 << 63) <= data < 1 << 63:
        raise ValueError("incrby takes a whole number of at most 64 bits")
    return (b"INCRBY", key, b"%d" % data)


def _incrbyfloat(key: bytes, data: Any, _: ToJson) -> Command:
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        raise TypeError(f"incrbyfloat takes a number, not {type(data).__name__}")
    number = float(data)
    if not math.isfinite(number):
        raise ValueError(f"incrbyfloat takes a finite number, not {number}")
    return (b"INCRBYFLOAT", key, repr(number).encode())


def _ltrim(key: bytes, data: Any, _: ToJson) -> Command:
    bounds = data if isinstance(data, (list, tuple)) else ()
    if len(bounds) != 2 or not all(type(each) is int and -(1 << 63) <= each < 1 << 63 for each in bounds):
        raise TypeError("ltrim takes the first and the last index to keep, as two whole numbers")
    return (b"LTRIM", key, *(b"%d" % each for each in bounds))


def _send_elements(command: bytes, key: bytes, data: Any, to_json: ToJson) -> Command:
    return (command, key, *(to_json(each) for each in _to_list(data)))


def _send_names(command: bytes, key: bytes, data: Any, _: ToJson) -> Command:
    return (command, key, *(_encode_name(each) for each in _to_list(data)))


def _send_fields(command: Command, data: Any, to_json: ToJson) -> Command:
    fields: list[bytes] = []
    for name, value in to_mapping(data).items():
        fields += (name.encode(), _encode_value(value, to_json))
    if not fields:
        raise ValueError("data has no fields; give at least one")
    return (*command, *fields)


def _zadd(key: bytes, data: Any, _: ToJson) -> Command:
    if not isinstance(data, Mapping) or not data:
        raise TypeError("zadd takes a dict of members and scores")
    pairs: list[bytes] = []
    for member, score in data.items():
        if isinstance(score, bool) or not isinstance(score, (int, float)) or math.isnan(score):
            raise TypeError(f"the score of {shorten(repr(member))} is not a number")
        pairs += (repr(float(score)).encode(), _encode_name(member))
    return (b"ZADD", key, *pairs)


def _stream(key: bytes, data: Any, to_json: ToJson) -> Command:
    return _send_fields((b"XADD", key, b"*"), data, to_json)


def _hset(key: bytes, data: Any, to_json: ToJson) -> Command:
    return _send_fields((b"HSET", key), data, to_json)


_OPERATIONS: Mapping[str, Callable[[bytes, Any, ToJson], Command]] = {
    "set": _set,
    "delete": _delete,
    "incrby": _incrby,
    "incrbyfloat": _incrbyfloat,
    "hset": _hset,
    "hdel": functools.partial(_send_names, b"HDEL"),
    "push": functools.partial(_send_elements, b"RPUSH"),
    "ltrim": _ltrim,
    "sadd": functools.partial(_send_elements, b"SADD"),
    "srem": functools.partial(_send_elements, b"SREM"),
    "zadd": _zadd,
    "zrem": functools.partial(_send_names, b"ZREM"),
    "stream": _stream,
}
