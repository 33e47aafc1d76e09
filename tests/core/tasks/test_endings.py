"""Endings of attempts: a decoder finds the class by the `kind` of the data; failures compare by what they say."""

from __future__ import annotations

import dataclasses

import pytest

from tidemill.core.tasks.endings import ENDINGS, AttemptEnding, Deferral, Failure, Idle, Loss, Skip, Success

ALL = [
    Success(),
    Failure("it broke", may_retry=False, origin="{}"),
    Skip("nothing to do"),
    Deferral("a.B", "{}", "resume"),
    Idle(),
    Idle(5, 7),
    Loss(),
    Loss(is_return=True),
]


@pytest.mark.parametrize("ending", ALL, ids=lambda ending: ending.kind)
def test_an_ending_is_made_again_from_its_fields(ending: AttemptEnding) -> None:
    fields = dataclasses.asdict(ending)
    assert ENDINGS[fields.pop("kind")](**fields) == ending


def test_every_ending_has_a_kind() -> None:
    assert set(ENDINGS.values()) == {type(ending) for ending in ALL}


def test_failures_of_different_origin_are_equal() -> None:
    assert Failure("it broke", origin="here") == Failure("it broke")
    assert Failure("it broke", may_retry=False) != Failure("it broke")
