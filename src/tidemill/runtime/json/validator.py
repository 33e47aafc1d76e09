"""Builds validators of JSON schema whose work is bounded for every schema and value.

Before its work, each keyword spends the work's cost from a budget (`run_bounded`). When the budget is used up,
`TooMuchWorkError` ends the validation. Work is counted instead of timed, so that the same value always has the same
result. Regular expressions are searched for in linear time (`patterns`), so the keywords that use them are implemented
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import jsonschema
import referencing

from tidemill.core.errors import TidemillError
from tidemill.runtime.json.patterns import PatternError, check_pattern, is_found, weigh_pattern

#: A call of a keyword costs 1, which takes about 2 us; a value of 64 KiB in an ordinary schema costs up to 100,000.
BUDGET: Final = 200_000
#: How much one unit pays for: characters compared to a position of a pattern, characters of a message.
_COMPARED: Final = 500
_WRITTEN: Final = 200
#: The limit of measuring: values that contain themselves are endless, and shared parts make values far larger than they
#: look.
_ENOUGH: Final = 1_000_000
#: Formats whose checks take linear time; as in `jsonschema`, installed packages decide which of them are checked.
_FORMATS: Final = frozenset(
    {"date", "date-time", "email", "idn-email", "ipv4", "ipv6", "json-pointer", "relative-json-pointer", "time", "uuid"}
)

_Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Iterator[Any]]


class TooMuchWorkError(TidemillError):
    """Checking a value takes more work than is allowed."""


class _Work:
    """The rest of the budget; `error_cost` is the cost of a message, which may quote value and schema."""

    def __init__(self, characters: int) -> None:
        self.left = BUDGET
        self.error_cost = 1 + characters // _WRITTEN

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise TooMuchWorkError("the validation takes too much work")


_work: ContextVar[_Work] = ContextVar("schema_work")


@contextlib.contextmanager
def run_bounded(characters: int) -> Iterator[None]:
    """Give validations within the context their budget.

    Args:
        characters: The length of value and schema.
    """
    token = _work.set(_Work(characters))
    try:
        yield
    finally:
        _work.reset(token)


def build_validator(schema: Any) -> Any:
    """Return a validator, which works within `run_bounded` only; nothing that the schema refers to is fetched."""
    return _Validator(schema, format_checker=_formats, registry=referencing.Registry())


def measure(value: Any, enough: int = _ENOUGH) -> tuple[int, int]:
    """Return the size of a JSON value, about its number of characters, and its nesting depth.

    A part counts as often as it would be written. Measuring stops once the size exceeds `enough`.

    Example:
        >>> measure({"a": ["bcd"]})
        (16, 2)
    """
    size = depth = 0
    level = [value]
    while level and size < enough:
        below: list[Any] = []
        for part in level:
            if size >= enough:
                break
            if isinstance(part, dict):
                size += 2 + sum(len(str(key)) + 4 for key in part)
                below.extend(part.values())
            elif isinstance(part, list | tuple | set | frozenset):
                size += 2 + 2 * len(part)
                below.extend(part)
            else:
                size += len(part) + 2 if isinstance(part, str | bytes) else 4
        depth += bool(below)
        level = below
    return size, depth


def _search_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _search(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, below in patterns.items():
            for key, value in instance.items():
                if _search(pattern, key):
                    yield from validator.descend(value, below, path=key, schema_path=pattern)


def _check_additional_properties(validator: Any, below: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [key for key in instance if key not in known and not any(_search(pattern, key) for pattern in patterns)]
    if validator.is_type(below, "object"):
        for key in extras:
            yield from validator.descend(instance[key], below, path=key)
    elif not below and extras:
        names = ", ".join(repr(key) for key in sorted(extras))
        verb = "was" if len(extras) == 1 else "were"
        yield jsonschema.ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")


def _check_unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if wanted and validator.is_type(instance, "array") and len({_freeze(item) for item in instance}) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")


def _freeze(value: Any) -> Any:
    """Return a value that is equal for values that JSON schema considers equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return dict, frozenset((key, _freeze(item)) for key, item in value.items())
    if isinstance(value, list):
        return list, tuple(map(_freeze, value))
    return (bool, value) if isinstance(value, bool) else value


def _search(pattern: str, text: str) -> bool:
    _work.get().spend(1 + weigh_pattern(pattern) * len(text) // _COMPARED)
    return is_found(pattern, text)


def _bound(keyword: str, check: _Keyword) -> _Keyword:
    find_cost = _COSTS.get(keyword, _cost_of_call)

    def check_bounded(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        work = _work.get()
        work.spend(find_cost(value, instance))
        for error in check(validator, value, instance, schema) or ():
            work.spend(work.error_cost)
            yield error

    return check_bounded


def _cost_of_call(value: Any, instance: Any) -> int:
    return 1


def _cost_of_value(value: Any, instance: Any) -> int:
    """The keyword works on each part of the schema's value."""
    return 1 + measure(value)[0] // 10


def _cost_of_parts(value: Any, instance: Any) -> int:
    """The keyword works on each part of the instance."""
    return 1 + (len(instance) if isinstance(instance, list | dict) else 0)


def _cost_of_all(value: Any, instance: Any) -> int:
    """The whole instance is compared to each part of the schema's value."""
    candidates = len(value) if isinstance(value, list) else 1
    return 1 + candidates * (1 + measure(instance)[0] // 100)


def _cost_of_pairs(value: Any, instance: Any) -> int:
    """Each part of the instance is looked up in a list of the same length."""
    return 1 + (len(instance) ** 2 // 50 + len(instance) if isinstance(instance, list | dict) else 0)


def _cost_of_format(value: Any, instance: Any) -> int:
    """A character of a regular expression may be a class with folded case, which takes half a millisecond."""
    length = len(instance) if isinstance(instance, str) else 0
    return 1 + (length * 200 if value == "regex" else length // 100)


_COSTS: Final[dict[str, Callable[[Any, Any], int]]] = {
    "$dynamicRef": lambda value, instance: 10 + len(value) // 10,
    "$ref": lambda value, instance: 10 + len(value) // 10,
    "additionalProperties": _cost_of_parts,
    "const": _cost_of_all,
    "contains": _cost_of_parts,
    "dependentRequired": _cost_of_value,
    "enum": _cost_of_all,
    "format": _cost_of_format,
    "items": _cost_of_parts,
    "patternProperties": _cost_of_parts,
    "properties": lambda value, instance: 1 + len(value) // 10,
    "propertyNames": _cost_of_parts,
    "required": lambda value, instance: 1 + len(value) // 10,
    "unevaluatedItems": _cost_of_pairs,
    "unevaluatedProperties": _cost_of_pairs,
    "uniqueItems": lambda value, instance: 1 + measure(instance)[0] // 4,
}
_OURS: Final[dict[str, _Keyword]] = {
    "additionalProperties": _check_additional_properties,
    "pattern": _search_pattern,
    "patternProperties": _check_pattern_properties,
    "uniqueItems": _check_unique_items,
}
_Validator: Final = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        keyword: _bound(keyword, _OURS.get(keyword, check))
        for keyword, check in jsonschema.Draft202012Validator.VALIDATORS.items()
    },
)
_formats: Final[Any] = jsonschema.FormatChecker(formats=_FORMATS & set(jsonschema.FormatChecker.checkers))


def _is_regular_expression(value: object) -> bool:
    if isinstance(value, str):
        check_pattern(value)
    return True


_formats.checks("regex", raises=PatternError)(_is_regular_expression)
