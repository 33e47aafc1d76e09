"""Conditions on JSON documents, themselves written as JSON, so that a list of triggers can contain them.

A condition maps paths in a document to expectations; it holds if all expectations are met. A path consists of names and
array indexes, separated by dots; '' is the whole document. An expectation is a value, which must be equal, or a mapping
of comparisons:

    {"type": "order", "total": {"ge": 100}, "customer.country": {"in": ["NZ", "AU"]}, "test": {"exists": False}}

Invariants: values are compared as JSON values (true is not 1, 1 is 1.0); only two numbers or two strings have an order;
a missing value equals nothing, and only `ne` and `exists: false` hold for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


class _Missing:
    """The type of `_MISSING`, which stands for a missing value."""


_MISSING: Final = _Missing()

_ORDER: Final[Mapping[str, Callable[[float | str, float | str], bool]]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
#: All comparisons, in the order in which messages list them.
COMPARISONS: Final = ("eq", "ne", *_ORDER, "in", "exists")


@dataclass(frozen=True, slots=True)
class _Test:
    path: tuple[str, ...]
    comparison: str
    expected: object

    def holds(self, document: object) -> bool:
        found = _find(document, self.path)
        if self.comparison == "exists":
            return (found is not _MISSING) is self.expected
        if self.comparison == "ne":
            return not are_equal(found, self.expected)
        if self.comparison == "in":
            assert isinstance(self.expected, Sequence)
            return any(are_equal(found, one) for one in self.expected)
        if self.comparison == "eq":
            return are_equal(found, self.expected)
        return _compare(_ORDER[self.comparison], found, self.expected)


@dataclass(frozen=True, slots=True)
class JsonCondition:
    """A condition, created by `parse_condition`."""

    tests: tuple[_Test, ...]

    def holds(self, document: object) -> bool:
        """Return whether a parsed JSON document meets all expectations.

        Example:
            >>> parse_condition({"items.0.price": {"lt": 5}}).holds({"items": [{"price": 4.5}]})
            True
        """
        return all(test.holds(document) for test in self.tests)


def parse_condition(where: Mapping[str, object]) -> JsonCondition:
    """Return the condition that a mapping describes.

    Args:
        where: The expectations, by path.

    Raises:
        TypeError: `where` is not a mapping with string keys, or a comparison does not accept its operand.
        ValueError: A comparison is unknown.
    """
    if not isinstance(where, Mapping) or not all(isinstance(path, str) for path in where):
        raise TypeError(f"a condition must be a mapping of paths to expected values, got {type(where).__name__}")
    tests: list[_Test] = []
    for path, expected in where.items():
        steps = tuple(path.split(".")) if path else ()
        if isinstance(expected, Mapping):
            tests += [_parse_test(path, steps, str(name), operand) for name, operand in expected.items()]
        else:
            tests.append(_Test(steps, "eq", expected))
    return JsonCondition(tuple(tests))


def are_equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal.

    Example:
        >>> are_equal(1, 1.0), are_equal(1, True), are_equal([{"a": 1}], [{"a": 1}])
        (True, False, True)
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


def _parse_test(path: str, steps: tuple[str, ...], comparison: str, operand: object) -> _Test:
    if comparison not in COMPARISONS:
        raise ValueError(
            f"{path!r} has the unknown comparison {comparison!r}; use one of {', '.join(COMPARISONS)}; to "
            "compare with an object, write {eq: {...}}"
        )
    if comparison == "in" and not isinstance(operand, list):
        raise TypeError(f"{path!r}: `in` needs a list of values, got {type(operand).__name__}")
    if comparison == "exists" and not isinstance(operand, bool):
        raise TypeError(f"{path!r}: `exists` needs true or false, got {type(operand).__name__}")
    if comparison in _ORDER and (isinstance(operand, bool) or not isinstance(operand, int | float | str)):
        raise TypeError(f"{path!r}: `{comparison}` needs a number or a string, got {type(operand).__name__}")
    return _Test(steps, comparison, operand)


def _find(document: object, path: tuple[str, ...]) -> object:
    found = document
    for step in path:
        if isinstance(found, Mapping):
            found = found.get(step, _MISSING)
        elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return _MISSING
    return found


def _compare(compare: Callable[[float | str, float | str], bool], found: object, expected: object) -> bool:
    if isinstance(found, str) and isinstance(expected, str):
        return compare(found, expected)
    if isinstance(found, int | float) and isinstance(expected, int | float) and not isinstance(found, bool):
        return compare(found, expected)
    return False
