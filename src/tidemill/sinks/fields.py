"""The types of payloads' fields, checked by the annotations of their classes before a sink sees them.

A wrong type is the handler's fault, the same every time: it is named, with the field, what it is and what it has to be,
where the hook that returned it can still be blamed. What a value of the right type may be is each sink's own to know;
`check_choices` is for where that sink cannot be asked. `data`, and whatever else may be anything, is not looked at.

A combination of types that was found right is remembered, so that a payload costs one look-up.
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
    str: "text",
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

    def takes(self, value: Any) -> bool:
        if isinstance(value, (str, bytes)):  # sequences too, but nobody who wants a list means them
            return isinstance(value, tuple(kind for kind in self.kinds if kind is not Sequence))
        if isinstance(value, bool) and bool not in self.kinds:
            return False
        return isinstance(value, self.kinds) or (isinstance(value, int) and float in self.kinds)

    @property
    def wanted(self) -> str:
        return " or ".join(_NAMES.get(kind, kind.__name__) for kind in self.kinds)


@functools.cache
def _fields(payload_class: Any) -> Sequence[_Field]:
    """Return the fields of a class of payloads that can be checked."""
    hints = typing.get_type_hints(payload_class)
    fields = [_Field(name, hints[name]) for name in payload_class.__struct_fields__]
    return [field for field in fields if field.kinds]


def type_check(payload_class: type[Any]) -> Callable[[Any], None]:
    """Return what checks the types of payloads of a class; it raises a TypeError that names the field.

    Args:
        payload_class: The class whose annotations count; what subclasses add is their own.

    Example:
        >>> from tidemill.sinks.payloads import FilePayload
        >>> type_check(FilePayload)(FilePayload(path=7))
        Traceback (most recent call last):
        TypeError: FilePayload.path must be text, not int (7)
    """
    of: Any = payload_class
    return _type_check(of)


@functools.cache
def _type_check(payload_class: Any) -> Callable[[Any], None]:
    fields = _fields(payload_class)
    known: set[tuple[type[Any], ...]] = set()
    # One name more than there are fields, so that it always returns a tuple.
    values_of = operator.attrgetter("__class__", *[field.name for field in fields])

    def check(payload: Any) -> None:
        values = values_of(payload)
        kinds = tuple(map(type, values))
        if kinds in known:
            return
        for field, value in zip(fields, values[1:], strict=True):
            if not field.takes(value):
                given = f"{type(value).__name__} ({repr(value)[:200]})"
                raise TypeError(f"{type(payload).__name__}.{field.name} must be {field.wanted}, not {given}")
        if len(known) < _MAX_KNOWN:
            known.add(kinds)

    return check


def check_choices(payload: Any) -> None:
    """Check the fields of a payload whose values are listed in its class.

    Raises:
        ValueError: A field has none of them.

    Example:
        >>> from tidemill.sinks.payloads import RedisPayload
        >>> check_choices(RedisPayload(op="push"))
    """
    of: Any = type(payload)
    for field in _fields(of):
        value = getattr(payload, field.name)
        if field.choices and value not in field.choices:
            known = ", ".join(map(repr, field.choices))
            raise ValueError(f"{type(payload).__name__}.{field.name} must be one of {known}, not {value!r}")
