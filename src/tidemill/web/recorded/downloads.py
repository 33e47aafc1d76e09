"""Downloads of listed recordings, streamed one at a time.

Invariants: no text of a request becomes a path. Temporary files are removed when the download ends, even if its client
disconnects, reads nothing for a minute, or the server stops.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import structlog
from fastapi import Query
from fastapi.responses import Response, StreamingResponse

from tidemill.recorder.format.file_layout import Period
from tidemill.recorder.reading.tar_stream import find_room, stream_tar
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.archive import Archive
from tidemill.web.routes import Routes
from tidemill.web.workers import run_blocking

log = structlog.get_logger(__name__)

#: A client that reads nothing for this long is disconnected.
IDLE_CLIENT_SECONDS = 60.0
#: How long a download may take to start.
BEGIN_SECONDS = 30.0
MAX_PERIODS = 1000
_MARGIN_BYTES = 64 * 1024 * 1024
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class Download:
    """A download, whose chunks are produced on worker threads.

    Args:
        pieces: The chunks of the archive.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._is_ended = False

    def take(self) -> bytes | None:
        """Return the next chunk; None at the end. Blocks."""
        with self._lock:
            if self._is_ended:
                return None
            try:
                return next(self._pieces, None)
            finally:
                if self._is_ended:
                    self._close()

    def end(self) -> None:
        """Remove temporary files, now or when the current chunk is ready; callable from any thread."""
        self._is_ended = True
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def _close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()


class Downloads:
    """Streams recordings.

    Args:
        archive: Lists the recordings.
        idle_seconds: How long a client may read nothing.
    """

    def __init__(self, archive: Archive, idle_seconds: float = IDLE_CLIENT_SECONDS) -> None:
        self._archive = archive
        self._idle_seconds = idle_seconds
        self._current: Download | None = None
        self._began_at: float | None = None

    def close(self) -> None:
        """End the current download."""
        if self._current is not None:
            self._current.end()

    async def start(self, names: Sequence[str]) -> Response:
        """Return a response with an archive of some periods.

        Raises:
            Problem: A period is not listed, there is no space for a copy, or another download is running.
        """
        if self._is_busy():
            raise RequestProblem(429, "another download is running; try again when it has ended", {"Retry-After": "10"})
        self._began_at = time.monotonic()
        try:
            periods = await run_blocking(self._archive.find_periods, names)
            await run_blocking(_check_room, periods)
        except BaseException:
            self._began_at = None
            raise
        headers = {"Content-Disposition": f'attachment; filename="{_name_file(periods)}"'}
        return StreamingResponse(self._stream(periods), media_type="application/x-tar", headers=headers)

    def _is_busy(self) -> bool:
        # The first chunk is never requested if the client disconnects at once.
        begins = self._began_at is not None and time.monotonic() < self._began_at + BEGIN_SECONDS
        return self._current is not None or begins

    async def _stream(self, periods: Sequence[Period]) -> AsyncIterator[bytes]:
        download = self._current = Download(stream_tar(periods))
        self._began_at = None
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        timer = None
        try:
            while True:
                piece = await run_blocking(download.take)
                if piece is None:
                    return
                if piece:
                    if task is not None:
                        timer = loop.call_later(self._idle_seconds, task.cancel)
                    yield piece
                    if timer is not None:
                        timer.cancel()
        except (OSError, RequestProblem) as error:
            log.warning("a download of recordings was not completed", error=str(error))
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._current is download:
                self._current = None
            download.end()


def _check_room(periods: Sequence[Period]) -> None:
    needed, free = find_room(periods)
    if free < needed + _MARGIN_BYTES:
        raise RequestProblem(
            507,
            f"the copy of a recording needs {needed:,} bytes, but only {free:,} bytes are free in the temporary folder "
            "of this host; set TMPDIR to a larger folder, or use `tidemill record merge`",
        )


def _name_file(periods: Sequence[Period]) -> str:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = periods[0].name if len(periods) == 1 else f"tidemill-recordings-{now}"
    return f"{_UNSAFE.sub('_', name)}.tar"


def build_api(downloads: Downloads) -> Routes:
    router = Routes(tags=["recordings"])

    @router.get(
        "/recordings/download",
        summary="Recordings as a tar archive",
        description="Contains consistent copies, also of recordings that are being written. Unpack it into a folder "
        "for `tidemill web --dir` and `tidemill record merge`.",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-tar": {}}}},
    )
    async def download(
        period: Annotated[
            list[str],
            Query(min_length=1, max_length=MAX_PERIODS, description="RECORDING/PERIOD, as listed; repeatable."),
        ],
    ) -> Response:
        return await downloads.start(period)

    return router
