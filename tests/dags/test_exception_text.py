"""Exceptions that reach callbacks in another process."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest

from tidemill.core.errors import describe_error
from tidemill.dags import AirflowException
from tidemill.dags.attempt.exception_text import RebuiltError, rebuild_exception, write_origin
from tidemill.dags.exceptions import SensorTimeout, TaskDeferralError, TaskError


class TwoPartsError(Exception):
    """Has a constructor of its own."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")


class HostileError(Exception):
    def __new__(cls, *args: Any, hidden: str = "") -> HostileError:
        if not hidden:
            raise RuntimeError("not this way")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any, hidden: str = "") -> None:
        super().__init__(*args)


def carry(error: BaseException) -> BaseException:
    """Raise it, and rebuild it from what is written of it."""
    try:
        raise error
    except BaseException as raised:
        return rebuild_exception(describe_error(raised), write_origin(raised))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ValueError(),
        ValueError("a: b\nc"),
        KeyError("x"),
        FileNotFoundError(2, "No such file or directory", "in.csv"),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
        json.JSONDecodeError("bad", "doc", 1),
        TwoPartsError(7, where="here"),
        TaskError("no"),
        SystemExit(3),
    ],
)
def test_an_exception_is_rebuilt_with_its_class_and_text(error: BaseException) -> None:
    rebuilt = carry(error)
    assert isinstance(rebuilt, type(error))
    assert (type(rebuilt).__name__, str(rebuilt)) == (type(error).__name__, str(error))


def test_its_traceback_shows_the_places_of_the_original() -> None:
    shown = "".join(traceback.format_exception(carry(ValueError("x"))))
    assert f'File "{__file__}"' in shown
    assert "in carry\n    raise error\n" in shown
    assert shown.endswith("ValueError: x\n")


@pytest.mark.parametrize("error", [type("LocalError", (Exception,), {})("x"), HostileError("x", hidden="yes")])
def test_one_whose_class_cannot_be_had_is_of_a_class_with_its_name(error: Exception) -> None:
    rebuilt = carry(error)
    assert isinstance(rebuilt, RebuiltError)
    assert isinstance(rebuilt, AirflowException)
    assert (type(rebuilt).__name__, str(rebuilt)) == (type(error).__name__, "x")


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        ("SensorTimeout: too long", SensorTimeout, "too long"),
        ("TaskDeferralError: the trigger raised OSError\nmore", TaskDeferralError, "the trigger raised OSError\nmore"),
        ("the worker was lost", TaskError, "the worker was lost"),
        ("tasks failed: a", TaskError, "tasks failed: a"),
    ],
)
def test_what_was_not_raised_by_the_task_is_an_exception_too(error: str, cls: type, text: str) -> None:
    rebuilt = rebuild_exception(error, None)
    assert type(rebuilt) is cls
    assert str(rebuilt) == text


def test_a_damaged_origin_is_as_good_as_none() -> None:
    assert str(rebuild_exception("ValueError: x", "[1")) == "ValueError: x"


def test_of_a_deep_traceback_both_ends_are_kept() -> None:
    def dive(left: int) -> None:
        if not left:
            raise ValueError("deep")
        dive(left - 1)

    with pytest.raises(ValueError, match="deep") as raised:
        dive(500)
    origin = write_origin(raised.value)
    assert len(json.loads(origin)[2]) == 40
    assert len(origin) < 8_000
