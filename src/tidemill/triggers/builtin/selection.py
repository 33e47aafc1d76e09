"""Selects the messages that a trigger fires for, and builds the payload; shared by the Kafka and SQS triggers.

A message passes if its key is among the given ones, its value (read as JSON) meets a condition, and a user's function
accepts it. Each of these is optional. The function may also return the payload.
"""

from __future__ import annotations

import base64
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from tidemill.core.triggers.json_condition import JsonCondition, parse_condition
from tidemill.triggers.builtin.arguments import load_callable
from tidemill.triggers.builtin.identities import build_suffix

E = TypeVar("E")
ValueFormat = Literal["text", "json"]
OnInvalid = Literal["skip", "reject"]


class Left(enum.Enum):
    """Why nothing is fired: the message was not selected, or its value is not JSON."""

    OUT = "out"
    INVALID = "invalid"


class Selection:
    """A selection; it consists of JSON values, which are in `kwargs`.

    Args:
        apply: The classpath of a function that is called with the raw event. Its return value (or that of its
            coroutine) is the payload; True stands for the default payload, None and False for none.
        key: The key, or several, that pass; None: all pass.
        where: A condition on the value, see `core.triggers.json_condition`; None: every value passes.
        value_format: How the value appears in the payload: `text` (UTF-8, else `{"base64": ...}`) or `json`.
        on_invalid: What to do with a value that is not JSON where JSON is needed: `skip` it, or `reject` it, so that
            its producer dead-letters it.

    Raises:
        ConfigError: The function does not exist.
        TypeError: A value has the wrong type.
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        *,
        apply: str | None = None,
        key: str | Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        value_format: ValueFormat = "text",
        on_invalid: OnInvalid = "skip",
    ) -> None:
        if value_format not in ("text", "json"):
            raise ValueError(f"value_format must be text or json, got {value_format!r}")
        if on_invalid not in ("skip", "reject"):
            raise ValueError(f"on_invalid must be skip or reject, got {on_invalid!r}")
        if apply is not None and not isinstance(apply, str):
            raise TypeError(f"apply must name a function as package.module.function, got {apply!r}")
        keys = [key] if isinstance(key, str) else key
        if keys is not None and not (isinstance(keys, list | tuple) and all(isinstance(one, str) for one in keys)):
            raise TypeError(f"key must be a string or a list of strings, got {key!r}")
        self.kwargs: Final = {
            name: value
            for name, value, default in (
                ("apply", apply, None),
                ("key", key if key is None or isinstance(key, str) else list(key), None),
                ("where", where, None),
                ("value_format", value_format, "text"),
                ("on_invalid", on_invalid, "skip"),
            )
            if value != default
        }
        #: The suffix of the identities of selected events.
        self.identity_suffix: Final = build_suffix(self._describe_selection(apply, keys))
        self.rejects_invalid: Final = on_invalid == "reject"
        self._keys = None if keys is None else frozenset(one.encode() for one in keys)
        self._condition: JsonCondition | None = None if where is None else parse_condition(where)
        self._json = value_format == "json" or where is not None
        self._value_is_json = value_format == "json"
        self._apply = None if apply is None else load_callable(apply)

    def _describe_selection(self, apply: str | None, keys: Sequence[str] | None) -> dict[str, Any]:
        """Return everything that determines which events are fired and with which payload, in a canonical form."""
        selecting: dict[str, Any] = {name: value for name, value in self.kwargs.items() if name != "on_invalid"}
        if keys is not None:
            selecting["key"] = sorted(set(keys))
        if apply is not None:
            selecting["apply"] = apply.replace(":", ".")
        return selecting

    async def select(
        self, event: E, key: bytes | None, value: bytes | None, describe: Callable[[E], dict[str, Any]]
    ) -> Any:
        """Return the payload for a raw event, or why nothing is fired.

        Args:
            event: The raw event, passed to the user's function.
            key: The key of the message.
            value: The value of the message.
            describe: Returns the default payload without `value`; called only if needed.
        """
        if self._keys is not None and key not in self._keys:
            return Left.OUT
        document = None
        if self._json:
            try:
                document = None if value is None else _decode(value)
            except (ValueError, RecursionError):
                return Left.INVALID
        if self._condition is not None and not self._condition.holds(document):
            return Left.OUT
        fired = True if self._apply is None else await self._call_function(self._apply, event)
        if fired is not True:
            return Left.OUT if fired is None or fired is False else fired
        payload = describe(event)
        payload["value"] = document if self._value_is_json else encode_bytes(value)
        return payload

    async def _call_function(self, apply: Callable[..., Any], event: E) -> Any:
        answer = apply(event)
        return await answer if inspect.isawaitable(answer) else answer


def encode_bytes(data: bytes | None) -> str | dict[str, str] | None:
    """Return bytes in a form that JSON can hold: a string if they are UTF-8, base64 otherwise.

    Example:
        >>> encode_bytes(b"tide"), encode_bytes(bytes([255]))
        ('tide', {'base64': '/w=='})
    """
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


_decode = msgspec.json.Decoder().decode
