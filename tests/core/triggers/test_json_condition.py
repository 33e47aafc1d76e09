"""Conditions on JSON documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.json_condition import COMPARISONS, are_equal, parse_condition

ORDER = {"type": "order", "total": 120.5, "test": False, "items": [{"sku": "a"}, {"sku": "b"}], "note": None}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"type": "order"},
        {"type": "order", "total": {"ge": 120.5, "lt": 121}},
        {"total": {"gt": 120, "le": 120.5}},
        {"type": {"in": ["order", "refund"]}},
        {"type": {"gt": "orde"}},
        {"items.1.sku": "b"},
        {"items": [{"sku": "a"}, {"sku": "b"}]},
        {"items.0": {"eq": {"sku": "a"}}},
        {"note": None},
        {"note": {"exists": True}},
        {"customer": {"exists": False}},
        {"customer.name": {"ne": "x"}},
        {"test": False},
        {"": {"exists": True}},
    ],
)
def test_a_condition_holds(where):
    assert parse_condition(where).holds(ORDER)


@pytest.mark.parametrize(
    "where",
    [
        {"type": "refund"},
        {"type": "order", "total": {"gt": 120.5}},
        {"total": {"gt": "120"}},
        {"type": {"gt": 1}},
        {"test": {"lt": 1}},
        {"test": 0},
        {"items.2.sku": {"exists": True}},
        {"items.x": {"exists": True}},
        {"items.²": {"exists": True}},
        {"type.0": {"exists": True}},
        {"customer": None},
        {"note": {"exists": False}},
        {"type": {"ne": "order"}},
        {"type": {"in": []}},
        {"items": [{"sku": "a"}]},
        {"items.0": {"eq": {"sku": "b"}}},
        {"items.0": {"eq": {"name": "a"}}},
    ],
)
def test_a_condition_does_not_hold(where):
    assert not parse_condition(where).holds(ORDER)


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        (["type"], TypeError, "must be a mapping of paths"),
        ({1: "x"}, TypeError, "must be a mapping of paths"),
        ({"a": {"above": 1}}, ValueError, "'a' has the unknown comparison 'above'; use one of eq, ne, gt"),
        ({"a": {"in": "abc"}}, TypeError, "`in` needs a list"),
        ({"a": {"exists": "yes"}}, TypeError, "`exists` needs true or false"),
        ({"a": {"gt": True}}, TypeError, "`gt` needs a number or a string"),
        ({"a": {"lt": None}}, TypeError, "`lt` needs a number or a string"),
    ],
)
def test_an_invalid_condition_is_refused(where, error, said):
    with pytest.raises(error, match=said):
        parse_condition(where)


@given(json_values)
def test_every_document_equals_itself_and_existing_values_are_found(value):
    assert are_equal(value, value)
    assert parse_condition({"a.b": {"eq": value}}).holds({"a": {"b": value}})
    assert parse_condition({"a.b": {"in": [value]}}).holds({"a": {"b": value}})


@given(json_values, json_values)
def test_equality_is_symmetric_and_ne_is_its_opposite(one, other):
    assert are_equal(one, other) is are_equal(other, one)
    assert parse_condition({"a": {"ne": other}}).holds({"a": one}) is not are_equal(one, other)


@given(json_values, st.sampled_from([name for name in COMPARISONS if name not in ("in", "exists")]), st.integers())
def test_no_document_makes_a_condition_raise(document, comparison, operand):
    assert parse_condition({"a.0": {comparison: operand}}).holds(document) in (True, False)
