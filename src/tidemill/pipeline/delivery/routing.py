"""Finds the sink of every payload that a hook returned.

Invariant: the names and types of the whole result are checked before any of it is delivered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.config.sink_types import SINK_TYPES, load_class, name_sink_section
from tidemill.core.errors import AmbiguousSinkError, SinkNotConfiguredError
from tidemill.deadletters.payloads import encode_payload
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.fields import build_type_check
from tidemill.sinks.payloads import CollectResult, CustomPayload
from tidemill.sinks.sending.sender import Sender

#: Field of `CollectResult`, type of sink, and class of payload; payloads of custom sinks name their type themselves.
_FIELDS: Sequence[tuple[str, str, type[Any]]] = (
    *((kind.field, kind.name, load_class(kind.payload)) for kind in SINK_TYPES.values()),
    ("custom", "", CustomPayload),
)

#: The cache limit, for handlers that create payload classes dynamically.
_MAX_KNOWN = 100


class Origin(msgspec.Struct):
    """The origin of payloads: determines their order and goes into letters; all messages are from one partition.

    Attributes:
        sources: The messages.
        task: The task, if the payloads are of one.
        size_bytes: The size of the payloads, once they are submitted.
        hook: The hook that returned them.
    """

    sources: Sequence[SourceMessage]
    task: ExecutorTask | None = None
    size_bytes: int = 0
    hook: str = ""


class RoutedPayload(msgspec.Struct, gc=False):
    """A payload and the sender of its sink."""

    sender: Sender
    payload: Any


class Router:
    """Finds the senders of an engine's payloads.

    Args:
        senders: The senders by type and name of their sinks.
    """

    def __init__(self, senders: Mapping[str, Mapping[str, Sender]]) -> None:
        self._senders = senders
        #: By class of payload: the check of its fields, and the senders found so far by name.
        self._found: dict[type[Any], tuple[Callable[[Any], None], dict[str, Sender]]] = {}

    def route(self, collect: CollectResult) -> list[RoutedPayload]:
        """Find the sink of every payload that a hook returned.

        Raises:
            SinkNotConfiguredError: A payload names a sink that does not exist.
            AmbiguousSinkError: A payload names no sink although there are several.
            TypeError: A field contains a value that is not a payload of its type, or a payload's field has a wrong
                type.
        """
        routed: list[RoutedPayload] = []
        for field, _, payload_class in _FIELDS:
            payloads = getattr(collect, field)
            if not payloads:
                continue
            if not isinstance(payloads, Sequence) or isinstance(payloads, (str, bytes)):
                raise TypeError(
                    f"CollectResult.{field} must be a list of {payload_class.__name__}, not {type(payloads).__name__}"
                )
            for payload in payloads:
                if not isinstance(payload, payload_class):
                    raise TypeError(
                        f"CollectResult.{field} must be a list of {payload_class.__name__}; it contains "
                        f"{type(payload).__name__}"
                    )
                routed.append(self.route_one(payload))
        return routed

    def route_one(self, payload: Any) -> RoutedPayload:
        """Find the sink of a payload.

        Raises:
            SinkNotConfiguredError: It names a sink that does not exist.
            AmbiguousSinkError: It names no sink although there are several.
            TypeError: It is not a payload, or one of its fields has a wrong type.
        """
        cls: Any = type(payload)
        found = self._found.get(cls)
        if found is None:
            found = build_type_check(_find_kind(cls)[1]), {}
            if len(self._found) < _MAX_KNOWN:
                self._found[cls] = found
        check, senders = found
        check(payload)
        sender = senders.get(payload.sink)
        if sender is None:
            kind = _find_kind(cls)[0]
            sender = self._find_sender(kind or payload.type, payload.sink)
            if kind:  # the class of a custom payload does not determine its sender
                senders[payload.sink] = sender
        return RoutedPayload(sender, payload)

    def _find_sender(self, kind: str, name: str) -> Sender:
        named = self._senders.get(kind)
        section = name_sink_section(kind or "<type>")
        if not named:
            raise SinkNotConfiguredError(f"no sink of type {kind!r} is configured; add {section}.<name>")
        if name:
            sender = named.get(name)
            if sender is None:
                raise SinkNotConfiguredError(f"{section}.{name} is not configured; configured: {_list_names(named)}")
            return sender
        if len(named) > 1:
            raise AmbiguousSinkError(
                f"several sinks of type {kind!r} are configured; name one in the payload: {_list_names(named)}"
            )
        return next(iter(named.values()))


@functools.cache
def _find_kind(cls: type[Any]) -> tuple[str, type[Any]]:
    """Return the sink type of a payload class ('': its payloads name it themselves), and tidemill's base class.

    Raises:
        TypeError: It is not a payload class.
    """
    for _, kind, payload_class in _FIELDS:
        if issubclass(cls, payload_class):
            return kind, payload_class
    known = ", ".join(payload_class.__name__ for _, _, payload_class in _FIELDS)
    raise TypeError(f"a payload must be one of {known}, not {cls.__name__}")


def encode_payloads(collect: CollectResult | Sequence[Any]) -> list[str]:
    """Return the payloads of an undelivered result, encoded for its letter."""
    if not isinstance(collect, CollectResult):
        return [encode_payload(payload) for payload in collect]
    fields = [_list_safely(getattr(collect, field)) for field, _, _ in _FIELDS]
    return [encode_payload(payload) for field in fields for payload in field]


def _list_safely(payloads: Any) -> Sequence[Any]:
    """Return the payloads of a list; none if the list itself raises, which may be why it is not delivered."""
    try:
        return [*payloads] if isinstance(payloads, Sequence) else ()
    except BaseException:
        return ()


def _list_names(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named))
