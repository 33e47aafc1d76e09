"""Sends requests about messages to engines, on the link's loop: where an open message is, and what the handler does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidemill.config.redaction import redact_text
from tidemill.core.errors import RemoteError, UserActionError
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.server import LinkServer
from tidemill.sources.base import name_partition
from tidemill.spark.live.supervised_slot import SupervisedSlot

#: How much longer than the engine the link's loop may take.
CALL_SECONDS = 1.0
#: The slot whose engine probes messages.
_PROBE_SLOT = 0


async def find_message(
    server: LinkServer, slots: Sequence[SupervisedSlot], topic: str, partition: int, offset: int
) -> OpenMessage | None:
    """Return where a message is; None if it is not open.

    Raises:
        RemoteError: The engine that owns its partition does not respond.
    """
    name = name_partition((topic, partition))
    progress = [slot.progress for slot in slots if slot.progress is not None]
    if any(offset < each.committed.get(name, 0) for each in progress):
        return None
    owner = next((slot for slot in slots if slot.progress is not None and name in slot.progress.partitions), None)
    if owner is None:
        stage: MessageStage | None = MessageStage(stage=OpenStage.NO_OWNER)
    elif owner.link is None:
        raise RemoteError(f"the link to engine {owner.number} is lost")
    else:
        try:
            stage = await server.ask(owner.link, topic, partition, offset)
        except RemoteError as error:
            raise RemoteError(f"engine {owner.number}: {error}") from None
    if stage is None or (
        stage.stage is OpenStage.NOT_READ and owner is not None and _is_beyond_end(owner, name, offset)
    ):
        return None
    stage = replace(stage, why=redact_text(stage.why))
    number = owner.number if owner is not None else None
    return OpenMessage(topic, partition, offset, number, stage, stage.describe())


async def probe_message(
    server: LinkServer, slots: Sequence[SupervisedSlot], message: SourceMessage, seconds: float
) -> ProbeReport:
    """Return what an engine's handler does with a message.

    Args:
        server: The link.
        slots: All slots.
        message: The message.
        seconds: How long the probe may take.

    Raises:
        UserActionError: No engine can probe the message; the text says why.
        RemoteError: The engine does not respond.
    """
    link = slots[_PROBE_SLOT].link if slots else None
    if link is None:
        raise UserActionError(f"engine {_PROBE_SLOT} is not connected: it is starting or was lost; try again")
    try:
        return await server.probe(link, message, seconds)
    except RemoteError as error:
        raise RemoteError(f"engine {_PROBE_SLOT}: {error}") from None
    except UserActionError as error:
        raise UserActionError(f"engine {_PROBE_SLOT}: {error}") from None


def _is_beyond_end(owner: SupervisedSlot, name: str, offset: int) -> bool:
    """Return whether a partition ended before an offset, as of about a second ago; False if unknown."""
    progress = owner.progress
    if progress is None or name not in progress.committed or name not in progress.lag:
        return False
    return offset >= progress.committed[name] + progress.lag[name]
