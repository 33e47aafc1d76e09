"""Answers requests of other processes to a driver: `tidemill status`, `tidemill release`.

The desk has its own thread, so the pipeline never waits for it. It answers for the driver's whole lifetime, also while
Spark starts. To support another request, add an entry to the table passed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.runtime.sockets.control_socket import ControlThread
from tidemill.runtime.sockets.pipeline_socket import Request, pipeline_socket
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.rate import Rate

#: How often messages are counted; the rate covers the last few seconds.
_COUNT_SECONDS = 1.0
_RATE_SECONDS = 10.0


class ControlDesk:
    """The control socket of a driver during a block.

    Args:
        kafka: The section as configured; other processes find the pipeline by it.
        worker: The worker name.
        progress: Returns the sums over all engines; called from this thread.
        report: Returns the answer to `status`, given the progress and the messages per second.
        requests: Functions for further requests, by name.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        worker: str,
        progress: Callable[[], PipelineProgress],
        report: Callable[[PipelineProgress, float], dict[str, Any]],
        requests: Mapping[str, Request],
    ) -> None:
        self._progress = progress
        self._report = report
        self._rate = Rate(_RATE_SECONDS)
        self._per_second = 0.0
        self._ended = threading.Event()
        table: dict[str, Request] = {"status": self._answer_status, **requests}
        self._thread = ControlThread(pipeline_socket(kafka, worker, table))

    def __enter__(self) -> Self:
        """Start listening.

        Raises:
            ConfigError: The folder for sockets cannot be used.
        """
        self._thread.__enter__()
        self._thread.loop.call_soon_threadsafe(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._ended.set()
        self._thread.__exit__(kind, error, trace)

    def _count(self) -> None:
        if not self._ended.is_set():
            self._thread.loop.call_later(_COUNT_SECONDS, self._count)
            self._per_second = self._rate.add(time.monotonic(), self._progress().messages_done)

    def _answer_status(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._report(self._progress(), self._per_second)
