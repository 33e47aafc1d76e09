"""Checks the types of payloads' fields against the annotations of their classes, before a sink sees them.

A wrong type is the handler's mistake, and the same every time: the error names the field, what it is and what it must
be, while the hook that returned it is still known. Which values of the right type are valid is up to each sink;
`check_choices` is for cases where the sink is not available. `data` and other fields that may be anything are not
checked.

Combinations of types that were right are remembered, so that a payload costs one look-up.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

#: More combinations of types than this are not remembered.
_MAX_KNOWN = 1_000
_NAMES = {
    str: "a string",
    bytes: "bytes",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
    Mapping: "a mapping",
    Sequence: "a list",
}


class _Field:
    """One field: what it may be.

    Attributes:
        kinds: The classes; () for anything.
        choices: The values, where the annotation lists them.
    """

    __slots__ = ("choices", "kinds", "name")

    def __init__(self, name: str, annotation: Any) -> None:
        self.name = name
        self.kinds: tuple[type[Any], ...] = ()
        self.choices: tuple[Any, ...] = ()
        union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        parts = typing.get_args(annotation) if union else (annotation,)
        kinds: list[type[Any]] = []
        for part in parts:
            origin = typing.get_origin(part)
            if origin is Literal:
                self.choices += typing.get_args(part)
                kinds += {type(choice) for choice in typing.get_args(part)}
            elif part is Any or not isinstance(origin or part, type):  # a type variable, say: nothing to check
                return
            else:
                kinds.append(origin or part)
        self.kinds = tuple(kinds)

    def accepts(self, value: Any) -> bool:
        if isinstance(value, (str, bytes)):  # sequences too, but not what is meant by a list
            return isinstance(value, tuple(kind for kind in self.kinds if kind is not Sequence))
        if isinstance(value, bool) and bool not in self.kinds:
            return False
        return isinstance(value, self.kinds) or (isinstance(value, int) and float in self.kinds)

    @property
    def expected(self) -> str:
        return " or ".join(_NAMES.get(kind, kind.__name__) for kind in self.kinds)


@functools.cache
def _list_fields(payload_class: Any) -> Sequence[_Field]:
    """Return the fields of a class of payloads that can be checked."""
    hints = typing.get_type_hints(payload_class)
    fields = [_Field(name, hints[name]) for name in payload_class.__struct_fields__]
    return [field for field in fields if field.kinds]


def build_type_check(payload_class: type[Any]) -> Callable[[Any], None]:
    """Return a function that checks the types of a class of payloads; it raises a TypeError that names the field.

    Args:
        payload_class: The class whose annotations count; fields that subclasses add are not checked.

    Example:
        >>> from tidemill.sinks.payloads import FilePayload
        >>> build_type_check(FilePayload)(FilePayload(path=7))
        Traceback (most recent call last):
        TypeError: FilePayload.path must be a string, not int (7)
    """
    of: Any = payload_class
    return _build_check(of)


@functools.cache
def _build_check(payload_class: Any) -> Callable[[Any], None]:
    fields = _list_fields(payload_class)
    known: set[tuple[type[Any], ...]] = set()
    # One name more than there are fields, so that it always returns a tuple.
    get_values = operator.attrgetter("__class__", *[field.name for field in fields])

    def check(payload: Any) -> None:
        values = get_values(payload)
        kinds = tuple(map(type, values))
        if kinds in known:
            return
        for field, value in zip(fields, values[1:], strict=True):
            if not field.accepts(value):
                given = f"{type(value).__name__} ({repr(value)[:200]})"
                raise TypeError(f"{type(payload).__name__}.{field.name} must be {field.expected}, not {given}")
        if len(known) < _MAX_KNOWN:
            known.add(kinds)

    return check


def check_choices(payload: Any) -> None:
    """Check those fields of a payload whose possible values its class lists.

    Raises:
        ValueError: A field has another value.

    Example:
        >>> from tidemill.sinks.payloads import RedisPayload
        >>> check_choices(RedisPayload(op="push"))
    """
    of: Any = type(payload)
    for field in _list_fields(of):
        value = getattr(payload, field.name)
        if field.choices and value not in field.choices:
            known = ", ".join(map(repr, field.choices))
            raise ValueError(f"{type(payload).__name__}.{field.name} must be one of {known}, not {value!r}")
