"""Serializes the structure of a DAG as JSON, sorted and without defaults: equal structures give equal text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec

from tidemill.core.tasks.structure import FORMAT, DagStructure

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(DagStructure).decode


def write_structure(structure: DagStructure) -> bytes:
    """Return a structure as JSON.

    Example:
        >>> write_structure(DagStructure("a", tags=("x",)))
        b'{"format":1,"id":"a","tags":["x"]}'
    """
    return _encode({**_drop_usual(structure), "format": structure.format})


def read_structure(text: bytes) -> DagStructure:
    """Return the structure that a text was written from.

    Raises:
        ValueError: The text is not a structure, or has another format.
    """
    structure = _decode(text)
    if structure.format != FORMAT:
        raise ValueError(f"the structure of DAG {structure.id!r} has format {structure.format}, not {FORMAT}")
    return structure


def _drop_usual(value: Any) -> Any:
    """Return a value of plain JSON, without the fields that have their default."""
    if isinstance(value, tuple):
        return [_drop_usual(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for name, usual in _list_defaults(value.__class__):
        item = getattr(value, name)
        if item != usual:
            found[name] = _drop_usual(item)
    return found


@functools.cache
def _list_defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass with their defaults."""
    return tuple(
        (each.name, each.default if each.default_factory is dataclasses.MISSING else each.default_factory())
        for each in dataclasses.fields(kind)
    )
