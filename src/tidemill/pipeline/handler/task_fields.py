"""Checks and copies the fields of a task when the handler creates it.

A wrong value is refused here, by name, in the line of the handler that creates the task. Invariants: the engine can
use, encode and show every field of a task without running code of the user's classes; ids and labels can be encoded as
UTF-8; a list or a mapping that the handler keeps, and changes later, changes no task.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

from tidemill.core.errors import escape_surrogates

_LISTS = frozenset({list, tuple})
_TEXTS = "a mapping of strings to strings"


class ReadOnlyTexts(dict[str, str]):
    """The `env` or the `labels` of a task: a dict that cannot be changed."""

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "env and labels of a task cannot be changed; "
            "msgspec.structs.replace(task, labels={**task.labels, ...}) returns a changed copy"
        )

    __setitem__ = __delitem__ = _refuse
    clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __reduce__(self) -> tuple[type[ReadOnlyTexts], tuple[dict[str, str]]]:
        """Return what `copy` and `pickle` rebuild it from; by default they would set one item after another."""
        return ReadOnlyTexts, (dict(self),)


NO_TEXTS = ReadOnlyTexts()


def clean_id(name: str, value: object) -> str:
    """Return an id as a plain string that can be encoded.

    Raises:
        TypeError: It is not a string.
    """
    if not isinstance(value, str):
        raise make_type_error(name, "a string", value)
    return escape_surrogates(str.__str__(value))


def copy_args(task_id: str, args: object) -> tuple[str, ...]:
    """Return the arguments of a task; paths and bytes become text that stands for the same bytes.

    Raises:
        TypeError: They are not a list of strings.
    """
    copied = _copy_list(task_id, "args", "strings", args)
    for arg in copied:
        if type(arg) is not str:
            return tuple([_read_argument(task_id, each) for each in copied])
    return copied


def _read_argument(task_id: str, arg: object) -> str:
    if not isinstance(arg, (str, bytes, os.PathLike)):
        raise make_type_error(name_field(task_id, "args"), "a list of strings", arg, "one with ")
    return str.__str__(os.fsdecode(arg))


def copy_offsets(task_id: str, offsets: object) -> tuple[int, ...]:
    """Return the source offsets of a task.

    Raises:
        TypeError: They are not a list of whole numbers.
    """
    copied = _copy_list(task_id, "source_offsets", "whole numbers", offsets)
    for offset in copied:
        if type(offset) is not int:
            return tuple([_read_offset(task_id, each) for each in copied])
    return copied


def _read_offset(task_id: str, offset: object) -> int:
    if not isinstance(offset, Integral):
        raise make_type_error(name_field(task_id, "source_offsets"), "a list of whole numbers", offset, "one with ")
    return int(offset)


def _copy_list(task_id: str, field: str, of: str, value: Any) -> tuple[Any, ...]:
    if type(value) not in _LISTS and (not isinstance(value, Sequence) or isinstance(value, (str, bytes))):
        raise make_type_error(name_field(task_id, field), f"a list of {of}", value)
    return tuple(value)


def copy_texts(task_id: str, field: str, value: object, *, escapes: bool) -> ReadOnlyTexts:
    """Return the names and values of `env` or `labels`.

    Args:
        task_id: The task.
        field: The field.
        value: Its value.
        escapes: Whether to escape lone surrogates.

    Raises:
        TypeError: It is not a mapping of strings to strings.
    """
    if type(value) is not dict and not isinstance(value, Mapping):
        raise make_type_error(name_field(task_id, field), _TEXTS, value)
    copied: dict[str, str] = {}
    for name, text in value.items():
        if type(name) is not str or type(text) is not str:
            name, text = _read_text(task_id, field, name), _read_text(task_id, field, text)
        if escapes and not (name.isascii() and text.isascii()):
            name, text = escape_surrogates(name), escape_surrogates(text)
        copied[name] = text
    return ReadOnlyTexts(copied)


def _read_text(task_id: str, field: str, text: object) -> str:
    if not isinstance(text, str):
        raise make_type_error(name_field(task_id, field), _TEXTS, text, "one with ")
    return str.__str__(text)


def copy_data(name: str, wanted: str, value: object) -> str | bytes:
    """Return text or bytes as exactly one of these types.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    raise make_type_error(name, wanted, value)


def check_limit(task_id: str, limit: float) -> None:
    """Check the time limit of a task.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not above 0.
    """
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise make_type_error(name_field(task_id, "timeout_seconds"), "a number of seconds or None", limit)
    if not limit > 0:
        raise ValueError(f"timeout_seconds of task {task_id!r} must be more than 0, not {limit!r}")


def name_field(task_id: str, field: str) -> str:
    """Return the name of a field in an error."""
    return f"{field} of task {repr(task_id)[:200]}"


def make_type_error(name: str, wanted: str, given: object, within: str = "") -> TypeError:
    """Return the error for a value of a wrong type.

    Args:
        name: The name of the field.
        wanted: What it has to be.
        given: What it is, or contains.
        within: The words between `not` and the value.
    """
    return TypeError(f"{name} must be {wanted}, not {within}{describe_value(given)}")


def describe_value(value: object) -> str:
    """Return the type and the beginning of a wrong value."""
    return f"{type(value).__name__} ({repr(value)[:200]})"
