"""Gives other threads access to the engines of a pipeline while its link is open."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.core.errors import UserActionError
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.server import TakeLive
from tidemill.spark.live.supervisor import Supervisor
from tidemill.spark.live.user_actions import UserActions


class LinkedEngines:
    """Requests to the engines; before the link is open and after it is closed, they find no engine.

    Args:
        find_topic: Returns the source topic.

    Attributes:
        live: The supervisor while its link is open.
    """

    def __init__(self, find_topic: Callable[[], str]) -> None:
        self._find_topic = find_topic
        self.live: Supervisor | None = None

    @property
    def actions(self) -> UserActions | None:
        """The actions that users may take on the engines."""
        live = self.live
        return live.actions if live is not None else None

    def find_message(self, topic: str, partition: int, offset: int) -> OpenMessage | None:
        """Return where a message is; None if it is not open, or of another topic. See `Supervisor.find_message`."""
        live = self.live
        if live is None or topic != self._find_topic():
            return None
        return live.find_message(topic, partition, offset)

    def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler of engine 0; see `Supervisor.probe`.

        Raises:
            UserActionError: No engine is running, or it cannot probe the message.
            RemoteError: The engine does not respond.
        """
        live = self.live
        if live is None:
            raise UserActionError("no engine is running: the pipeline is starting or stopping; try again")
        return live.probe(message, seconds)

    def watch(self, take: TakeLive, seconds: float) -> None:
        """Make the engines report their running tasks; see `LinkServer.watch`."""
        live = self.live
        if live is not None:
            live.watch(take, seconds)
