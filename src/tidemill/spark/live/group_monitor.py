"""Checks from the driver whether each partition of the source topic has an owner, and triggers a rebalance if not.

`core.supervision.orphan_partitions` decides when a partition has been without an owner for too long.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import describe_error
from tidemill.core.supervision.orphan_partitions import OwnerWatch
from tidemill.runtime.log.setup import throttle
from tidemill.sources.membership import GroupViewer, distribute_again

log = structlog.get_logger(__name__)

LOOK_SECONDS = 10.0
#: Added to the time that an engine may take to finish its work before it gives up partitions.
MARGIN_SECONDS = 15.0


class GroupWatch:
    """A thread that checks the consumer group during a block.

    Args:
        settings: The settings of the pipeline.
        look_seconds: The time between two checks.
        patience_seconds: How long a partition may be without an owner; None: the revoke timeout and a margin.
    """

    def __init__(
        self, settings: Settings, *, look_seconds: float = LOOK_SECONDS, patience_seconds: float | None = None
    ) -> None:
        if patience_seconds is None:
            patience_seconds = settings.revoke_timeout_seconds + MARGIN_SECONDS
        self._settings = settings
        self._look_seconds = look_seconds
        self._watch = OwnerWatch(patience_seconds)
        self._ended = threading.Event()
        self._mending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tidemill-groupwatch", daemon=True)
        #: How many rebalances this watch has triggered.
        self.mended = 0

    @property
    def orphans(self) -> list[int]:
        """The partitions that had been without an owner for too long at the last check."""
        return self._watch.orphans

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the thread without waiting for a query in progress, but wait for a rebalance that it has triggered."""
        self._ended.set()
        with self._mending:
            pass

    def _run(self) -> None:
        viewer = GroupViewer(self._settings)
        while not self._ended.wait(self._look_seconds):
            try:
                view = viewer.look()
                named = self._watch.check(time.monotonic(), *view)
                with self._mending:
                    if named and not self._ended.is_set():
                        self._mend(named)
            except Exception as error:
                # Engines report brokers that are down, and ACLs may forbid describing groups.
                throttle(log, 600.0).info("cannot look up the consumer group", error=describe_error(error))

    def _mend(self, partitions: list[int]) -> None:
        log.warning(
            "partitions have no owner although the group is stable; triggering a rebalance",
            topic=self._settings.kafka.source_topic,
            partitions=partitions,
        )
        distribute_again(self._settings)
        self.mended += 1
