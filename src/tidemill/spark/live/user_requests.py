"""Requests of this user's other processes to a pipeline: `tidemill trace`, `release`, `pause`, `resume`, `restart`.

Each action is logged and recorded, just like actions from the web UI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from tidemill.core.errors import RemoteError, UserActionError
from tidemill.runtime.sockets.pipeline_socket import Request
from tidemill.spark.live.user_actions import UserActions

log = structlog.get_logger(__name__)

_MAX_BY_CHARS = 100
#: Called with an action and the user who requested it.
Note = Callable[[str, str], None]


class Control:
    """Actions of users on a pipeline whose engines may not be running.

    Args:
        find: Returns the object that carries out actions; None while no engines have been started.
    """

    def __init__(self, find: Callable[[], UserActions | None]) -> None:
        self._find = find

    def release(self) -> list[dict[str, Any]]:
        """Release the brakes; see `UserActions.release`."""
        actions = self._find()
        return actions.release() if actions is not None else []

    def pause(self, seconds: float, partition: int | None, by: str) -> None:
        """Pause for a time; see `UserActions.pause`."""
        self._require().pause(seconds, partition, by)

    def resume(self, partition: int | None) -> int:
        """End pauses; see `UserActions.resume`."""
        return self._require().resume(partition)

    def restart(self, slot: int) -> None:
        """Restart an engine; see `UserActions.restart`."""
        self._require().restart(slot)

    def _require(self) -> UserActions:
        actions = self._find()
        if actions is None:
            raise UserActionError("no engine is running: the pipeline is starting or stopping; try again")
        return actions


def describe_pause(seconds: float, partition: int | None) -> str:
    """Return the text under which a pause is recorded.

    Example:
        >>> describe_pause(900.0, None), describe_pause(60.0, 3)
        ('pause all partitions for 900 s', 'pause partition 3 for 60 s')
    """
    return f"pause {_name(partition)} for {seconds:g} s"


def describe_resume(partition: int | None) -> str:
    """Return the text under which a resume is recorded."""
    return f"resume {_name(partition)}"


def _name(partition: int | None) -> str:
    return "all partitions" if partition is None else f"partition {partition}"


def make_requests(
    control: Control, note: Note, trace: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Request]:
    """Return the functions that handle each request, by name.

    Args:
        control: The actions of users.
        note: Called with each action and the user who requested it.
        trace: Answers a trace request; blocks.
    """

    async def on_trace(request: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(trace, request)

    def answering(function: Callable[[dict[str, Any], str], dict[str, Any]]) -> Request:
        async def answer(request: dict[str, Any]) -> dict[str, Any]:
            by = str(request.get("by") or "the command line")[:_MAX_BY_CHARS]
            try:
                return await asyncio.to_thread(function, request, by)
            except (RemoteError, UserActionError) as error:
                return {"error": str(error)}

        return answer

    def release(request: dict[str, Any], by: str) -> dict[str, Any]:
        engines = control.release()
        if engines:
            note("release", by)
        return {"engines": engines}

    def pause(request: dict[str, Any], by: str) -> dict[str, Any]:
        seconds, partition = _read_number(request, "seconds", float), _read_partition(request)
        control.pause(seconds, partition, by)
        note(describe_pause(seconds, partition), by)
        return {"paused": _name(partition), "seconds": seconds}

    def resume(request: dict[str, Any], by: str) -> dict[str, Any]:
        partition = _read_partition(request)
        ended = control.resume(partition)
        if ended:
            note(describe_resume(partition), by)
        return {"resumed": ended}

    def restart(request: dict[str, Any], by: str) -> dict[str, Any]:
        slot = _read_number(request, "engine", int)
        control.restart(slot)
        note(f"restart engine {slot}", by)
        return {"restarted": slot}

    table = {"release": release, "pause": pause, "resume": resume, "restart": restart}
    return {"trace": on_trace, **{name: answering(function) for name, function in table.items()}}


def _read_partition(request: dict[str, Any]) -> int | None:
    return None if request.get("partition") is None else _read_number(request, "partition", int)


def _read_number(request: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise UserActionError(f"{name}: not a number: {value!r}")
    return value
