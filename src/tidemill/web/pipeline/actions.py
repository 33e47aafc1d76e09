"""Actions on a pipeline, from its pages and over the API; each is recorded with its user.

The guard has checked role, token and origin before it calls this module.
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
from tidemill.web.pipeline.models import PipelineActionDone
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.workers import run_blocking

ArgsP = ParamSpec("ArgsP")
AnswerT = TypeVar("AnswerT")
Partition = Annotated[
    int | None,
    Field(ge=0, le=2**31 - 1, strict=True, description="A partition of the source topic; null: all of them."),
]


class PauseOrder(BaseModel):
    """The partition to pause, and for how long."""

    model_config = ConfigDict(extra="forbid")
    seconds: float = Field(
        ge=MIN_PAUSE_SECONDS, le=MAX_PAUSE_SECONDS, description="The length of the pause, from 1 second to 7 days."
    )
    partition: Partition = None


class ResumeOrder(BaseModel):
    """The partition to resume."""

    model_config = ConfigDict(extra="forbid")
    partition: Partition = None


class ConfirmedOrder(BaseModel):
    """A typed confirmation, so that no action happens by accident."""

    model_config = ConfigDict(extra="forbid")
    confirm: Annotated[str, Field(max_length=1024, description="The text that the action requires.")]


def _check_confirmation(order: ConfirmedOrder, word: str) -> None:
    if order.confirm != word:
        raise RequestProblem(409, f"nothing was done; set confirm to {word!r}, not to {order.confirm[:100]!r}")


async def _carry_out(function: Callable[ArgsP, AnswerT], *args: ArgsP.args, **kwargs: ArgsP.kwargs) -> AnswerT:
    try:
        return await run_blocking(function, *args, **kwargs)
    except RemoteError as error:
        raise RequestProblem(503, str(error)) from error
    except UserActionError as error:
        raise RequestProblem(409, str(error)) from error


def _name(partition: int | None) -> str:
    return "all partitions" if partition is None else f"partition {partition}"


def build_actions(watched: Watched, note: Callable[[str, str], None]) -> Routes:
    """Return the routes.

    Args:
        watched: The pipeline.
        note: Records an action and its user.
    """
    router = Routes(prefix="/actions", tags=["actions"])
    control = watched.control

    @router.post("/release", summary="Release the failure brake of all engines")
    async def release(request: Request) -> PipelineActionDone:
        engines = await _carry_out(control.release)
        if not engines:
            raise RequestProblem(409, "no failure brake is on, and no message is held")
        note("release", request.state.identity.name)
        held = format_count(sum(engine["held"] for engine in engines), "held message")
        return PipelineActionDone(
            text=f"Released the brake of {format_count(len(engines), 'engine')}; {held} become dead letters."
        )

    @router.post(
        "/drain",
        summary="Drain: stop reading, finish messages in flight, commit, and exit",
        description="`confirm` is the name of the consumer group.",
    )
    async def drain(request: Request, order: ConfirmedOrder) -> PipelineActionDone:
        _check_confirmation(order, watched.settings.kafka.consumer_group)
        note("drain", request.state.identity.name)
        watched.drain()
        return PipelineActionDone(text="The pipeline drains and then exits.")

    @router.post(
        "/pause",
        summary="Pause reading for a time; messages in flight continue",
        description="Pausing the same partition again, or all of them again, changes the end of the pause. A pause "
        "ends by itself, and when the pipeline stops.",
    )
    async def pause(request: Request, order: PauseOrder) -> PipelineActionDone:
        by = request.state.identity.name
        await _carry_out(control.pause, order.seconds, order.partition, by)
        note(describe_pause(order.seconds, order.partition), by)
        return PipelineActionDone(text=f"Paused {_name(order.partition)} for {format_duration(order.seconds)}.")

    @router.post("/resume", summary="End the pause of a partition, or all pauses")
    async def resume(request: Request, order: ResumeOrder) -> PipelineActionDone:
        ended = await _carry_out(control.resume, order.partition)
        if not ended:
            raise RequestProblem(409, f"{_name(order.partition)}: not paused, so there is nothing to resume")
        note(describe_resume(order.partition), request.state.identity.name)
        return PipelineActionDone(text=f"Resumed {_name(order.partition)}.")

    @router.post(
        "/engines/{slot}/restart",
        summary="Restart an engine",
        description="The engine finishes its messages and commits; the next engine of its slot takes over its "
        "partitions. `confirm` is `restart` and the number of the engine, as in `restart 0`.",
    )
    async def restart(
        request: Request, slot: Annotated[int, Path(ge=0, le=10_000)], order: ConfirmedOrder
    ) -> PipelineActionDone:
        _check_confirmation(order, f"restart {slot}")
        await _carry_out(control.restart, slot)
        note(f"restart engine {slot}", request.state.identity.name)
        return PipelineActionDone(text=f"Engine {slot} drains and then restarts.")

    return router
