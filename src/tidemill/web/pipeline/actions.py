"""What may be done to a pipeline from its pages and over the API; each action is recorded with who did it.

The guard has checked role, token and origin before anything here is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from tidemill.core.errors import RemoteError, UserActionError
from tidemill.core.supervision.pauses import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS
from tidemill.core.wording import format_count
from tidemill.spark.live.user_requests import describe_pause, describe_resume
from tidemill.spark.live.web_ui import Watched
from tidemill.web.formats import format_duration
from tidemill.web.pipeline.models import Done
from tidemill.web.problems import Problem
from tidemill.web.routes import Routes
from tidemill.web.workers import run_blocking

ArgsP = ParamSpec("ArgsP")
AnswerT = TypeVar("AnswerT")
Partition = Annotated[
    int | None, Field(ge=0, le=2**31 - 1, strict=True, description="Of the source topic; null: all partitions.")
]


class PauseOrder(BaseModel):
    """For how long nothing is read, and of what."""

    model_config = ConfigDict(extra="forbid")
    seconds: float = Field(
        ge=MIN_PAUSE_SECONDS, le=MAX_PAUSE_SECONDS, description="For how long; from 1 second to 7 days."
    )
    partition: Partition = None


class ResumeOrder(BaseModel):
    """What is read again."""

    model_config = ConfigDict(extra="forbid")
    partition: Partition = None


class ConfirmedOrder(BaseModel):
    """What somebody has typed, so that nothing ends by a slip."""

    model_config = ConfigDict(extra="forbid")
    confirm: Annotated[str, Field(max_length=1024, description="What the action asks for.")]


def _check_confirmation(order: ConfirmedOrder, word: str) -> None:
    if order.confirm != word:
        raise Problem(409, f"nothing was done: confirm it with {word!r}, and not with {order.confirm[:100]!r}")


async def _carry_out(function: Callable[ArgsP, AnswerT], *args: ArgsP.args, **kwargs: ArgsP.kwargs) -> AnswerT:
    try:
        return await run_blocking(function, *args, **kwargs)
    except RemoteError as error:
        raise Problem(503, str(error)) from error
    except UserActionError as error:
        raise Problem(409, str(error)) from error


def _name(partition: int | None) -> str:
    return "all partitions" if partition is None else f"partition {partition}"


def build_actions(watched: Watched, note: Callable[[str, str], None]) -> Routes:
    """Return the routes.

    Args:
        watched: The pipeline.
        note: Records what was done and by whom.
    """
    router = Routes(prefix="/actions", tags=["actions"])
    control = watched.control

    @router.post("/release", summary="Release the failure brake of all engines")
    async def release(request: Request) -> Done:
        engines = await _carry_out(control.release)
        if not engines:
            raise Problem(409, "no brake is on, and nothing is held")
        note("release", request.state.identity.name)
        held = format_count(sum(engine["held"] for engine in engines), "held message")
        return Done(text=f"Released the brake of {format_count(len(engines), 'engine')}; {held} become dead letters.")

    @router.post(
        "/drain",
        summary="Drain: read no more, finish what is running, commit, and end",
        description="`confirm` is the name of the consumer group.",
    )
    async def drain(request: Request, order: ConfirmedOrder) -> Done:
        _check_confirmation(order, watched.settings.kafka.consumer_group)
        note("drain", request.state.identity.name)
        watched.drain()
        return Done(text="The pipeline drains, and ends.")

    @router.post(
        "/pause",
        summary="Read no new messages for a time; what is in flight continues",
        description="Another pause of the same partition, or of all, changes when it ends. It ends by itself, and "
        "with the run.",
    )
    async def pause(request: Request, order: PauseOrder) -> Done:
        by = request.state.identity.name
        await _carry_out(control.pause, order.seconds, order.partition, by)
        note(describe_pause(order.seconds, order.partition), by)
        return Done(text=f"Paused {_name(order.partition)} for {format_duration(order.seconds)}.")

    @router.post("/resume", summary="End the pause of a partition, or all pauses")
    async def resume(request: Request, order: ResumeOrder) -> Done:
        ended = await _carry_out(control.resume, order.partition)
        if not ended:
            raise Problem(409, f"{_name(order.partition)}: not paused")
        note(describe_resume(order.partition), request.state.identity.name)
        return Done(text=f"Resumed {_name(order.partition)}.")

    @router.post(
        "/engines/{slot}/restart",
        summary="Restart an engine",
        description="It finishes what is running and commits; the next engine of its slot takes its partitions over. "
        "`confirm` is `restart` and the number of the engine.",
    )
    async def restart(request: Request, slot: Annotated[int, Path(ge=0, le=10_000)], order: ConfirmedOrder) -> Done:
        _check_confirmation(order, f"restart {slot}")
        await _carry_out(control.restart, slot)
        note(f"restart engine {slot}", request.state.identity.name)
        return Done(text=f"Engine {slot} drains, and starts again.")

    return router
