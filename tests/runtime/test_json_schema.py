"""JSON schema of users: what matches, and that no schema and no value takes more than bounded work to check."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.runtime.json.patterns import PatternError, is_found, weigh_pattern
from tidemill.runtime.json.schema import SchemaError, check_schema, find_mismatch

#: CPU time of this thread, so that a load elsewhere does not count; what was found took minutes to centuries.
MOST_SECONDS = 10.0
EXPONENTIAL = {
    "$defs": {
        **{f"d{depth}": {"anyOf": [{"$ref": f"#/$defs/d{depth + 1}"}] * 3} for depth in range(40)},
        "d40": {"type": "string"},
    },
    "$ref": "#/$defs/d0",
}
TREE = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]}
TOO_LONG = "p: checking it against its schema takes too long; give a smaller value, or simplify the schema"


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"pattern": "^(a+)+$"}, "a" * 60_000 + "!", "p: 'aaa"),
        ({"pattern": ".*a.{10000}c$"}, "ab" * 30_000, TOO_LONG),
        ({"patternProperties": {"^(a+)+$": {"type": "null"}}}, {"a" * 60_000 + "!": 1}, ""),
        ({"patternProperties": {"^(a+)+$": True}, "additionalProperties": False}, {"a" * 60_000 + "!": 1}, "p: Addit"),
        ({"propertyNames": {"pattern": "^(a|aa)+$"}}, {"a" * 60_000 + "!": 1}, "p: 'aaa"),
        ({"format": "regex"}, "(?i)" + "[\x00-\U0010ffff]" * 5000, TOO_LONG),
        ({"uniqueItems": True}, [{"a": number} for number in range(5000)], ""),
        ({"items": {"enum": [f"{number}" for number in range(5000)]}}, ["4999"] * 5000, TOO_LONG),
        ({"items": {"multipleOf": 1e-300}}, [10**300] * 5000, "p[0]: 1000"),
        ({"multipleOf": 5e-324}, 1.7e308, ""),
        ({"prefixItems": [True], "unevaluatedItems": False}, list(range(9000)), TOO_LONG),
        (EXPONENTIAL, 5, TOO_LONG),
        (TREE, nest(64), ""),
        (TREE, nest(65), "p: the value is nested too deeply; values with a schema may have 64 levels"),
        ({"type": "string"}, "a" * 65_537, "p: the value is too large; values with a schema may have up to 64 KiB"),
        ({"type": "array"}, [1] * 65_537, "p: the value is too large; values with a schema may have up to 64 KiB"),
        ({"anyOf": [{"type": "integer"}] * 3000}, "x" * 60_000, TOO_LONG),
    ],
)
def test_no_value_takes_long_to_check(schema: Any, value: Any, said: str) -> None:
    start = time.thread_time()
    found = find_mismatch(json.dumps(schema), value, "p")

    assert found.startswith(said) if said else not found
    assert time.thread_time() - start < MOST_SECONDS


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"type": "integer", "minimum": 0, "multipleOf": 1}}, list(range(10_000))),
        ({"items": {"pattern": r"^[\w.]+@[\w.]{2,20}\.\w{2,10}$"}}, ["somebody@example.org"] * 2500),
        ({"type": "string", "pattern": "^.{1,10000}$"}, "a" * 9000),
        ({"pattern": "\\p{Lu}"}, "é É"),
        ({"items": {"required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}},
         [{"a": 1}] * 4000),
        ({"uniqueItems": True}, [1, True, 0, False, "1", [1], [True], {"a": 1}, {"a": True}, None]),
        ({"format": "regex"}, "^a+$"),
        ({"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
         {"x-a": 1, "b": None}),
        ({"properties": {"pattern": {"type": "string"}}}, {"pattern": "("}),
    ],
)  # fmt: skip
def test_ordinary_values_match(schema: Any, value: Any) -> None:
    check_schema(schema)

    assert find_mismatch(json.dumps(schema), value, "p") == ""


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"uniqueItems": True}, [1, 1.0], "p: [1, 1.0] has non-unique elements"),
        ({"uniqueItems": True}, [{"a": [1], "b": 2}, {"b": 2, "a": [1.0]}], "p: [{'a': [1], 'b': 2}, {'b': 2"),
        ({"pattern": "^a$"}, "a\n", "p: 'a\\n' does not match '^a$'"),
        ({"format": "regex"}, "(", "p: '(' is not a 'regex'"),
        ({"format": "date"}, "2026-13-01", "p: '2026-13-01' is not a 'date'"),
        ({"patternProperties": {"^x-": {"type": "null"}}}, {"x-a": 1}, "p['x-a']: 1 is not of type 'null'"),
        (
            {"properties": {"a": True}, "additionalProperties": False},
            {"a": 1, "c": 2, "b": 3},
            "p: Additional properties are not allowed ('b', 'c' were unexpected)",
        ),
        (
            {"additionalProperties": False},
            {"b": 3},
            "p: Additional properties are not allowed ('b' was unexpected)",
        ),
        ({"additionalProperties": {"type": "null"}}, {"b": 3}, "p['b']: 3 is not of type 'null'"),
        ({"additionalProperties": False, "type": "object"}, [1], "p: [1] is not of type 'object'"),
    ],
)
def test_other_values_do_not_match(schema: Any, value: Any, said: str) -> None:
    check_schema(schema)

    assert find_mismatch(json.dumps(schema), value, "p").startswith(said)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "(?=a)b"}, "pattern '(?=a)b': look-around, "),
        ({"items": [{"pattern": "("}]}, "is not of type 'object', 'boolean'"),
        ({"prefixItems": [{"pattern": r"(a)\1"}]}, "backreferences are not supported"),
        ({"patternProperties": {"[": True}}, "pattern '[': unclosed character class"),
        (
            {"properties": {"const": {"pattern": "a{1000}{1000}"}}},
            "exceeds size limit of 10485760 bytes; use fewer repetitions",
        ),
        ({"enum": ["x" * 70_000]}, "it has 70,014 characters; up to 65,536 are allowed"),
        (
            {"patternProperties": {"a": True}, "unevaluatedProperties": False},
            "unevaluatedProperties cannot be used together with patternProperties; use additionalProperties",
        ),
    ],
)
def test_a_schema_that_could_not_be_checked_in_bounded_time_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(SchemaError) as refused:
        check_schema(schema)

    assert said in str(refused.value)


def test_what_only_looks_like_a_pattern_is_not_one() -> None:
    check_schema({"const": {"pattern": "("}, "default": {"pattern": "("}, "enum": [{"pattern": "("}]})


def share(depth: int) -> Any:
    """Return a value of `depth` small parts that is written in 2 ** depth."""
    value: Any = {"type": "integer"}
    for _ in range(depth):
        value = {"anyOf": [value, value]}
    return value


@pytest.mark.parametrize("schema", [share(60), {"enum": [[0] * 20_000] * 20_000}])
def test_a_schema_built_of_shared_parts_is_refused_before_it_is_written(schema: Any) -> None:
    began = time.thread_time()
    with pytest.raises(SchemaError, match="it is far too large, or contains itself; up to 65,536 characters"):
        check_schema(schema)
    assert time.thread_time() - began < MOST_SECONDS


def test_a_schema_that_is_somewhat_too_large_is_refused_by_its_length() -> None:
    with pytest.raises(SchemaError, match="it has 70,013 characters; up to 65,536 are allowed"):
        check_schema({"const": "a" * 70_000})


def test_a_value_built_of_shared_parts_is_not_expanded_to_be_measured() -> None:
    value = [[0] * 20_000] * 20_000
    assert find_mismatch('{"type": "array"}', value, "p").startswith("p: the value is too large")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)

    assert find_mismatch('{"type": "array"}', value, "p").startswith("p: the value is too large")


@pytest.mark.parametrize(
    ("pattern", "places"),
    [("abc", 3), (r"\d{4}-[0-9]{2}", 7), ("(a{2}b){3,}", 16), ("((a)){0}", 3), ("a)", 2), ("[[b]{3}]", 1)],
)
def test_how_often_something_is_repeated_counts(pattern: str, places: int) -> None:
    assert weigh_pattern(pattern) == places


@given(st.from_regex(r"[ab(){}\[\]|*+?,0-3\\]{0,20}", fullmatch=True))
def test_any_text_is_weighed_or_refused_as_a_pattern(pattern: str) -> None:
    assert weigh_pattern(pattern) >= 0
    with contextlib.suppress(PatternError):
        is_found(pattern, "abab")


KEYS = st.sampled_from(["a", "b", "x-a", "x-b", ""])
PATTERNS = st.sampled_from(["^x-", "a", "^$", "b$", "[ab]{1,2}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 1.5, "a", "b", ""]),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["integer", "number", "string", "object", "array", "null", "boolean"]),
            "pattern": PATTERNS,
            "uniqueItems": st.booleans(),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
            "minimum": st.integers(-1, 1),
            "maxItems": st.integers(0, 2),
            "required": st.lists(KEYS, max_size=2, unique=True),
        },
    ),
    lambda below: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(KEYS, below, max_size=2),
            "patternProperties": st.dictionaries(PATTERNS, below, max_size=2),
            "additionalProperties": below,
            "propertyNames": below,
            "items": below,
            "prefixItems": st.lists(below, min_size=1, max_size=2),
            "contains": below,
            "unevaluatedItems": below,
            "not": below,
            "anyOf": st.lists(below, min_size=1, max_size=2),
            "oneOf": st.lists(below, min_size=1, max_size=2),
        },
    ),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_what_matches_is_what_matches_without_bounds(schema: Any, value: Any) -> None:
    assert (find_mismatch(json.dumps(schema), value, "p") == "") is jsonschema.Draft202012Validator(schema).is_valid(
        value
    )
