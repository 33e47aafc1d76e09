"""Checks MongoDB filters: one that matches every document is a mistake, and would change or delete them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson

#: Top-level operators of a filter that may exclude nothing: their content is not evaluated here (`$expr`, `$where`), or
#: they exclude only documents that another condition matches (`$nor`).
_NO_CONDITIONS = frozenset(
    {"$comment", "$nor", "$expr", "$where", "$jsonSchema", "$sampleRate", "$alwaysTrue", "$alwaysFalse"}
)


def matches_everything(criteria: Mapping[str, Any]) -> bool:
    """Return whether a filter, decoded from BSON, has no field condition that excludes documents.

    Example:
        >>> [matches_everything(each) for each in ({}, {"$and": [{}]}, {"$or": [{}, {"a": 1}]}, {"a": 1})]
        [True, True, True, False]
    """
    return not any(_excludes(name, part) for name, part in criteria.items())


def _excludes(name: str, part: Any) -> bool:
    if name in ("$and", "$or"):
        each = (
            [isinstance(one, Mapping) and not matches_everything(one) for one in part] if isinstance(part, list) else []
        )
        return any(each) if name == "$and" else bool(each) and all(each)
    if name.startswith("$"):
        return name not in _NO_CONDITIONS
    if isinstance(part, Mapping) and next(iter(part), "").startswith("$"):
        return any(_operator_excludes(operator, value) for operator, value in part.items())
    return True


def _operator_excludes(operator: str, value: Any) -> bool:
    """Return whether a field's condition excludes documents that have the field."""
    match operator:
        case "$nin":
            return bool(value)
        case "$exists":
            return not value
        case "$ne":
            return value is not None
        case "$gt" | "$gte":
            return not isinstance(value, bson.MinKey)
        case "$lt" | "$lte":
            return not isinstance(value, bson.MaxKey)
        case "$not":
            return not (isinstance(value, Mapping) and any(_operator_matches_none(*each) for each in value.items()))
        case "$comment" | "$options":
            return False
    return True


def _operator_matches_none(operator: str, value: Any) -> bool:
    """Return whether a field's condition matches no document that has the field."""
    match operator:
        case "$in" | "$all" | "$exists":
            return not value
        case "$eq":
            return value is None
        case "$not":
            return isinstance(value, Mapping) and not any(_operator_excludes(*each) for each in value.items())
    return False
