"""Checks the types of payloads' fields against the annotations of their classes, before a sink sees them.

A wrong type is a mistake in the handler and repeats every time. The error names the field, its value and the expected
type while the hook that returned the payload is still known. Each sink decides which values of the right type are
valid; `check_choices` is for cases where the sink is not available. `data` and other fields of type Any are not
checked.

Valid combinations of types are cached, so that checking a payload costs one lookup.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

#: The cache holds at most this many combinations of types.
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
    """The types and values that one field may have.

    Attributes:
        kinds: The classes; () allows anything.
        choices: The values, if the annotation lists them.
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
            elif part is Any or not isinstance(origin or part, type):  # such as a type variable: nothing to check
                return
            else:
                kinds.append(origin or part)
        self.kinds = tuple(kinds)

    def accepts(self, value: Any) -> bool:
        if isinstance(value, (str, bytes)):  # sequences as well, but a field for a list must not accept them
            return isinstance(value, tuple(kind for kind in self.kinds if kind is not Sequence))
        if isinstance(value, bool) and bool not in self.kinds:
            return False
        return isinstance(value, self.kinds) or (isinstance(value, int) and float in self.kinds)

    @property
    def expected(self) -> str:
        return " or ".join(_NAMES.get(kind, kind.__name__) for kind in self.kinds)


@functools.cache
def _list_fields(payload_class: Any) -> Sequence[_Field]:
    """Return the fields of a payload class that can be checked."""
    hints = typing.get_type_hints(payload_class)
    fields = [_Field(name, hints[name]) for name in payload_class.__struct_fields__]
    return [field for field in fields if field.kinds]


def build_type_check(payload_class: type[Any]) -> Callable[[Any], None]:
    """Return a function that checks the field types of a payload class; it raises a TypeError that names the field.

    Args:
        payload_class: The class with the annotations; fields that its subclasses add are not checked.

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
    # With one extra name, `attrgetter` returns a tuple even for a single field.
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
    """Check the fields of a payload whose class lists their possible values.

    Raises:
        ValueError: A field has a value that is not listed.

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
