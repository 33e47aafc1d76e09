"""Which messages a trigger fires for."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.core.errors import ConfigError
from tidemill.triggers.builtin.arguments import load_callable, resolve_environment
from tidemill.triggers.builtin.selection import Left, Selection

HERE = "tests.triggers.builtin.test_selection"
ORDER = b'{"type": "order", "total": 12}'


def doubled(event: Any) -> Any:
    return {"twice": event * 2}


async def later(event: Any) -> Any:
    return {"later": event}


def long_ones(event: Any) -> bool:
    return len(event) > 3


def nothing(event: Any) -> None:
    return None


NO_FUNCTION = 7


async def select(selection: Selection, value: bytes | None, key: bytes | None = None, event: Any = "raw") -> Any:
    return await selection.select(event, key, value, lambda event: {"topic": "t"})


async def test_without_conditions_every_message_is_fired_with_its_value_as_text():
    assert await select(Selection(), b"tide") == {"topic": "t", "value": "tide"}
    assert await select(Selection(), b"\xff") == {"topic": "t", "value": {"base64": "/w=="}}
    assert await select(Selection(), None) == {"topic": "t", "value": None}


async def test_values_are_read_as_json_if_asked_for():
    selection = Selection(value_format="json")
    assert await select(selection, ORDER) == {"topic": "t", "value": {"type": "order", "total": 12}}
    assert await select(selection, None) == {"topic": "t", "value": None}
    assert await select(selection, b"{") is Left.INVALID
    assert await select(selection, b"[" * 100_000) is Left.INVALID


async def test_a_condition_reads_json_and_leaves_the_value_as_it_is():
    selection = Selection(where={"total": {"ge": 10}})
    assert await select(selection, ORDER) == {"topic": "t", "value": ORDER.decode()}
    assert await select(selection, b'{"total": 9}') is Left.OUT
    assert await select(selection, b"") is Left.INVALID


async def test_keys_are_compared_before_anything_is_read():
    for keys in ("k", ["j", "k"]):
        selection = Selection(key=keys, value_format="json")
        assert (await select(selection, b"1", b"k"))["value"] == 1
        assert await select(selection, b"{", b"other") is Left.OUT
        assert await select(selection, b"{", None) is Left.OUT


@pytest.mark.parametrize(
    ("function", "event", "fired"),
    [
        ("doubled", "ab", {"twice": "abab"}),
        ("later", "ab", {"later": "ab"}),
        ("long_ones", "abcd", {"topic": "t", "value": "x"}),
        ("long_ones", "ab", Left.OUT),
        ("nothing", "ab", Left.OUT),
    ],
)
async def test_a_function_says_what_is_fired_and_whether(function, event, fired):
    for separator in (".", ":"):
        assert await select(Selection(apply=f"{HERE}{separator}{function}"), b"x", event=event) == fired


def test_only_values_that_are_not_the_default_are_serialized():
    assert Selection().kwargs == {}
    given = {
        "key": ["a"],
        "where": {"a": 1},
        "apply": f"{HERE}.doubled",
        "value_format": "json",
        "on_invalid": "reject",
    }
    assert Selection(**given).kwargs == given
    assert Selection(**Selection(**given).kwargs).kwargs == given


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"apply": "no.such.module.f"}, ConfigError, "the module 'no' is not installed"),
        ({"apply": f"{HERE}.absent"}, ConfigError, "has no 'absent'"),
        ({"apply": f"{HERE}.NO_FUNCTION"}, ConfigError, "is of type int; name a function"),
        ({"apply": "f"}, ConfigError, "write package.module.function"),
        ({"apply": doubled}, TypeError, "apply must name a function"),
        ({"key": [1]}, TypeError, "key must be a string or a list of strings"),
        ({"key": 1}, TypeError, "key must be a string or a list of strings"),
        ({"value_format": "xml"}, ValueError, "value_format must be text or json"),
        ({"on_invalid": "ignore"}, ValueError, "on_invalid must be skip or reject"),
        ({"where": {"a": {"above": 1}}}, ValueError, "unknown comparison 'above'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(kwargs, error, said):
    with pytest.raises(error, match=said):
        Selection(**kwargs)


def test_secrets_are_looked_up_when_they_are_needed():
    given = {"a": {"env": "A"}, "b": "b", "c": {"env": "A", "x": 1}, "d": 1}
    assert resolve_environment(given, {"A": "hunter2"}) == {"a": "hunter2", "b": "b", "c": {"env": "A", "x": 1}, "d": 1}
    assert given["a"] == {"env": "A"}
    with pytest.raises(ConfigError, match="a comes from the environment variable A, which is not set"):
        resolve_environment(given, {})


def test_a_module_that_needs_another_one_is_told_from_one_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the module 'no_such_module' is not installed"):
        load_callable("needs_more.f")


def test_a_selection_has_one_identity_suffix_however_it_is_written_and_none_where_nothing_selects():
    assert Selection().identity_suffix == Selection(on_invalid="reject").identity_suffix == ""
    assert Selection(key="a").identity_suffix == Selection(key=["a", "a"]).identity_suffix
    assert Selection(key=["a", "b"]).identity_suffix == Selection(key=("b", "a")).identity_suffix
    assert Selection(apply="json:dumps").identity_suffix == Selection(apply="json.dumps").identity_suffix
    assert Selection(where={"a": 1, "b": 2}).identity_suffix == Selection(where={"b": 2, "a": 1}).identity_suffix
    suffixes = {
        Selection(**kwargs).identity_suffix
        for kwargs in ({"key": "a"}, {"key": []}, {"where": {}}, {"value_format": "json"})
    }
    assert len(suffixes) == 4
