"""The page and the API of probes: run a pasted or recorded message, and show what the handler did with it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response
from starlette.requests import Request

from tidemill.config.settings import Settings
from tidemill.web.pages import Pages
from tidemill.web.probe.desk import ProbeDesk
from tidemill.web.probe.models import ProbeOrder, ProbeView, check_size, describe_probe, read_pasted
from tidemill.web.probe.waterfall import draw_probe
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.values.section import ValueReader
from tidemill.web.workers import BlockingRoute

_OFF = "probes are disabled; to enable them, set debug.probe_enabled to true"
AskedPartition = Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Partition of a recorded message.")]
AskedOffset = Annotated[int | None, Query(ge=0, le=2**63 - 2, description="Offset of a recorded message.")]


def build_probe_section(desk: ProbeDesk, reader: ValueReader, settings: Settings, pages: Pages) -> UiSection:
    """Return the section.

    Args:
        desk: Runs probes.
        reader: Reads recorded messages.
        settings: The pipeline's settings.
        pages: Renders the page.
    """
    if not settings.debug.probe_enabled:
        return UiSection([], _build_absent(("/probe", "/probe/state")), _build_absent(("/probe",)))
    pages.probe_topic = reader.topic
    return UiSection([NavigationLink("Probe", "/probe")], _build_pages(desk, reader, pages), _build_api(desk, reader))


def _build_absent(paths: tuple[str, ...]) -> Routes:
    router = Routes(include_in_schema=False)

    async def refuse() -> Response:
        raise RequestProblem(404, _OFF)

    for path in paths:
        router.add(path, refuse, methods=["GET", "POST"])
    return router


def _describe_newest(desk: ProbeDesk) -> dict[str, Any]:
    newest = desk.find_newest()
    probe = None if newest is None else describe_probe(newest)
    bars = draw_probe(probe.report) if probe is not None and probe.report is not None else []
    return {"probe": probe, "bars": bars, "version": _name_version(probe)}


def _name_version(probe: ProbeView | None) -> str:
    return "0" if probe is None else f"{probe.number}-{probe.ended_at}"


def _build_pages(desk: ProbeDesk, reader: ValueReader, pages: Pages) -> Routes:
    router = Routes(route_class=BlockingRoute)

    @router.get("/probe")
    def show(request: Request, partition: AskedPartition = None, offset: AskedOffset = None) -> Response:
        position = None if partition is None or offset is None else (partition, offset)
        return pages.answer(
            request, "probe/probe.html", topic=reader.topic, position=position, **_describe_newest(desk)
        )

    @router.get("/probe/state")
    async def show_state(request: Request, seen: Annotated[str, Query(max_length=100)] = "") -> Response:
        values = _describe_newest(desk)
        if seen == values["version"]:
            return Response(status_code=204)
        return pages.answer(request, "probe/state.html", **values)

    return router


def _build_api(desk: ProbeDesk, reader: ValueReader) -> Routes:
    router = Routes(route_class=BlockingRoute, prefix="/probe", tags=["probe"])

    @router.get("", summary="The running probe, or the last one of this process")
    async def read_newest() -> ProbeView:
        newest = desk.find_newest()
        if newest is None:
            raise RequestProblem(404, "no message has been probed since this process started")
        return describe_probe(newest)

    @router.post(
        "",
        status_code=202,
        summary="Run a message through the handler of engine 0",
        description="Nothing is delivered, committed, dead-lettered, recorded or written to the cache; side effects "
        "of the hooks themselves do happen. Read the result with GET; a probe takes at most 30 seconds. 429: another "
        "probe is running.",
    )
    def begin(request: Request, order: ProbeOrder) -> ProbeView:
        desk.refuse_second()
        if order.recorded:
            if (given := order.model_fields_set - {"recorded", "partition", "offset"}) or "offset" not in (
                order.model_fields_set
            ):
                what = f"{', '.join(sorted(given))} must be absent" if given else "offset is missing"
                raise RequestProblem(422, f"{what}; a recorded message is identified by partition and offset alone")
            message = reader.fetch(reader.topic, order.partition, order.offset)
        else:
            message = read_pasted(order, reader.topic)
        check_size(message)
        return describe_probe(desk.begin(message, request.state.identity.name, recorded=order.recorded))

    return router
