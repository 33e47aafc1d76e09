"""The requests of other processes that a driver's control desk carries out besides `status`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tidemill.core.errors import RemoteError
from tidemill.runtime.pipeline_socket import Request


def make_requests(
    release: Callable[[], list[dict[str, Any]]], trace: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Request]:
    """Return the requests by name; what blocks runs on threads of its own.

    Args:
        release: Releases the brakes, and returns what each of those engines holds.
        trace: Answers what is known of messages.
    """

    async def on_release(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"engines": await asyncio.to_thread(release)}
        except RemoteError as error:
            return {"error": str(error)}

    async def on_trace(request: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(trace, request)

    return {"release": on_release, "trace": on_trace}
