"""What other processes ask a driver to do: carried out, answered and noted, or refused with the reason."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill.core.errors import RemoteError, UserActionError
from tidemill.spark.live.user_requests import Control, make_requests


class Actions:
    """Stands in for the engines."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def release(self) -> list[dict[str, Any]]:
        return [{"slot": 0, "held": 2}] if not self.asked else []

    def pause(self, seconds: float, partition: int | None, by: str) -> None:
        self.asked.append((seconds, partition, by))

    def resume(self, partition: int | None) -> int:
        return 0 if partition == 9 else 1

    def restart(self, slot: int) -> None:
        if slot == 9:
            raise UserActionError("there is no engine 9")
        if slot == 8:
            raise RemoteError("the link does not answer")


def ask(actions: Actions | None, **request: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    noted: list[tuple[str, str]] = []
    control = Control(lambda: actions)  # type: ignore[arg-type, return-value]
    table = make_requests(control, lambda action, by: noted.append((action, by)), dict)

    async def run() -> dict[str, Any]:
        answer: Any = table[request["do"]](request)
        return dict(await answer)

    return asyncio.run(run()), noted


def test_what_is_done_is_noted_with_who_did_it() -> None:
    assert ask(Actions(), do="pause", seconds=60, partition=3, by="ann") == (
        {"paused": "partition 3", "seconds": 60},
        [("pause partition 3 for 60 s", "ann")],
    )
    assert ask(Actions(), do="resume") == ({"resumed": 1}, [("resume all partitions", "the command line")])
    assert ask(Actions(), do="restart", engine=1, by="x" * 500) == ({"restarted": 1}, [("restart engine 1", "x" * 100)])
    assert ask(Actions(), do="release") == ({"engines": [{"slot": 0, "held": 2}]}, [("release", "the command line")])


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"do": "pause"}, "seconds: not a number: None"),
        ({"do": "pause", "seconds": "60"}, "seconds: not a number: '60'"),
        ({"do": "pause", "seconds": True}, "seconds: not a number: True"),
        ({"do": "pause", "seconds": 60, "partition": 1.5}, "partition: not a number: 1.5"),
        ({"do": "restart", "engine": 9}, "there is no engine 9"),
        ({"do": "restart", "engine": 8}, "the link does not answer"),
        ({"do": "restart", "engine": "0"}, "engine: not a number: '0'"),
    ],
)
def test_what_is_wrong_is_answered_and_not_noted(request_: dict[str, Any], error: str) -> None:
    assert ask(Actions(), **request_) == ({"error": error}, [])


def test_what_changed_nothing_is_not_noted() -> None:
    actions = Actions()
    actions.asked.append("released before")
    assert ask(actions, do="release") == ({"engines": []}, [])
    assert ask(actions, do="resume", partition=9) == ({"resumed": 0}, [])


def test_without_engines_it_is_said_why() -> None:
    text = "no engine is running: the pipeline is starting or stopping; try again"
    for request in ({"do": "pause", "seconds": 1}, {"do": "resume"}, {"do": "restart", "engine": 0}):
        assert ask(None, **request) == ({"error": text}, [])
    assert ask(None, do="release") == ({"engines": []}, [])
