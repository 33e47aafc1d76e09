"""Endings of attempts arrive as the class that was sent; anything else is refused."""

from __future__ import annotations

import msgspec
import pytest

from tidemill.core.tasks.endings import ENDINGS, AttemptEnding, Deferral, Failure, Idle, Loss, Skip, Success
from tidemill.store.calls.worker_calls import AttemptReport, WorkerTurn
from tidemill.store.wire.frames import decode_call, encode_call

SENT = [
    Success(),
    Failure("ValueError: no", may_retry=False, origin="{}"),
    Skip("not today"),
    Deferral("a.Trigger", "{}", "resume", '{"a":1}', 5, "key", "queue"),
    Deferral("a.Trigger", "{}", "", streams=True, idle_us=3),
    Idle(5, 7),
    Loss(),
]


@pytest.mark.parametrize("ending", SENT, ids=lambda one: one.kind)
def test_an_ending_arrives_as_it_was_sent(ending: AttemptEnding) -> None:
    turn = WorkerTurn(1, 2, (AttemptReport(3, 4, ending),))
    number, received = decode_call(encode_call(7, turn)[4:])
    assert (number, repr(received)) == (7, repr(turn))


def test_every_ending_is_tested_here() -> None:
    assert {type(one) for one in SENT} == set(ENDINGS.values())


@pytest.mark.parametrize("value", [{"kind": "Other"}, {}, [], None, {"kind": []}, {"kind": "Failure"}], ids=repr)
def test_an_ending_of_unknown_kind_or_without_its_fields_is_refused(value: object) -> None:
    turn = {"id": 1, "call": {"type": "WorkerTurn", "session": 1, "request": 1}}
    turn["call"]["reports"] = [{"task": 1, "epoch": 1, "result": value}]  # type: ignore[index]
    with pytest.raises(msgspec.ValidationError):
        decode_call(msgspec.msgpack.encode(turn))
