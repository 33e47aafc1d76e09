"""A snapshot of a pipeline's engines, in pages; engines in trouble come first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated

from fastapi import Query

from tidemill.core.recorder.cursor import WrongCursorError, decode_cursor, encode_cursor
from tidemill.core.supervision.slot_limits import SlotState
from tidemill.runtime.link.progress import EngineProgress
from tidemill.spark.live.status_report import SILENT_SECONDS
from tidemill.spark.progress import EngineStatus
from tidemill.web.pipeline import models
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import parse_words

#: The number of engines on the overview.
SHOWN = 20
STATES = tuple(state.value for state in SlotState)
_WELL = (SlotState.RUNNING, SlotState.FINISHED)

StateFilter = Annotated[str, Query(max_length=20, description=", ".join(STATES))]
Engines = list[EngineStatus]


def rank_engine(engine: EngineStatus) -> tuple[int, int]:
    """Return the sort key of an engine; engines that do not run or are silent come first."""
    is_silent = (engine.silent_seconds or 0) >= SILENT_SECONDS
    return (int(engine.state in _WELL and not is_silent), engine.slot)


def find_engines(
    engines: Engines, state: str, cursor: str, limit: int, read_cpu: Callable[[int], float | None]
) -> models.EnginePage:
    """Return a page of engines.

    Args:
        engines: All engines.
        state: Only engines in this state; '': all.
        cursor: The cursor of the previous page; '': the first page.
        limit: The maximum number of rows.
        read_cpu: Returns the CPU use of a slot's engine, in percent of a core.

    Raises:
        Problem: The cursor or the state is invalid.
    """
    chosen = parse_words("state", [state], STATES)
    ranked = sorted((engine for engine in engines if not chosen or engine.state in chosen), key=rank_engine)
    begin, text = 0, f"engines {state}"
    if cursor:
        try:
            begin = bisect_right(ranked, decode_cursor(cursor, text, (int, int)), key=rank_engine)
        except WrongCursorError as error:
            raise RequestProblem(422, f"cursor: {error}") from error
    found = ranked[begin : begin + limit]
    return models.EnginePage(
        rows=[describe_engine(engine, read_cpu) for engine in found],
        cursor=None if begin + limit >= len(ranked) else encode_cursor(text, rank_engine(found[-1])),
        before=begin,
        matching=len(ranked),
        total=len(engines),
    )


def list_first(
    engines: Engines, read_cpu: Callable[[int], float | None], most: int = SHOWN
) -> list[models.EngineSlotView]:
    """Return all engines by number, or if there are too many, the first ones with those in trouble in front."""
    chosen = engines if len(engines) <= most else sorted(engines, key=rank_engine)[:most]
    return [describe_engine(engine, read_cpu) for engine in chosen]


def describe_engine(engine: EngineStatus, read_cpu: Callable[[int], float | None]) -> models.EngineSlotView:
    """Return an engine as pages and API show it."""
    now = engine.progress or EngineProgress()
    return models.EngineSlotView(
        slot=engine.slot,
        state=engine.state,
        is_well=engine.state in _WELL,
        host=engine.host,
        pid=engine.pid,
        starts=engine.starts,
        silent_seconds=engine.silent_seconds,
        partitions=len(now.partitions),
        tasks_running=now.tasks_running,
        tasks_queued=now.tasks_queued,
        tasks_in_backoff=now.tasks_retrying,
        in_flight=now.in_flight,
        done=now.messages_done + (engine.past.messages_done if engine.past is not None else 0),
        cpu_percent=read_cpu(engine.slot),
        rss_bytes=now.rss_bytes,
    )
