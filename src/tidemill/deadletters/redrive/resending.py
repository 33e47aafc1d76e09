"""What a dead letter becomes when it is sent again: records for a topic, or payloads for a sink.

Invariants: key, value and headers of a message are those it came with; only the headers of tidemill's own, at the end,
tell of its redrives. A payload is what the hook returned, or the letter is not sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.deadletters.letter import HISTORY_HEADER, REDRIVES_HEADER, Letter, history_in, redrives_in
from tidemill.deadletters.redrive.producer import Outgoing
from tidemill.deadletters.restore import Read, restored
from tidemill.runtime.messages import Header, SourceMessage

#: The history in the header keeps so many of the last letters, and so much of each error.
HISTORY_LETTERS = 10
HISTORY_ERROR = 300


def records_of(letter: Letter, read: Read, topic: str | None) -> list[Outgoing]:
    """Return the records that send a letter's messages again, each once.

    Args:
        letter: The letter.
        read: Reads a message from its topic.
        topic: Where to; None: where each came from.

    Raises:
        ContentLostError: A message cannot be had back.
        RemoteError: The brokers do not answer.
    """
    seen: set[tuple[str, int, int]] = set()
    records = []
    for source in letter.sources:
        place = (source.topic, source.partition, source.offset)
        if place in seen:
            continue
        seen.add(place)
        message = restored(source, read)
        records.append(
            Outgoing(
                topic or message.topic,
                -1 if topic else message.partition,
                message.key,
                message.value,
                resent_headers(letter, message),
            )
        )
    return records


def resent_headers(letter: Letter, message: SourceMessage) -> list[Header]:
    """Return a message's own headers, and those that tell of its redrives."""
    own = [(name, value) for name, value in message.headers if name not in (REDRIVES_HEADER, HISTORY_HEADER)]
    history = [*history_in(message.headers), _entry(letter, message)][-HISTORY_LETTERS:]
    return [
        *own,
        (REDRIVES_HEADER, str(redrives_in(message.headers) + 1).encode()),
        (HISTORY_HEADER, msgspec.json.encode(history)),
    ]


def without_history(record: Outgoing) -> Outgoing:
    """Return a record without the header that can be done without."""
    headers = [(name, value) for name, value in record.headers if name != HISTORY_HEADER]
    return msgspec.structs.replace(record, headers=headers)


def _entry(letter: Letter, message: SourceMessage) -> dict[str, Any]:
    return {
        "letter_id": letter.letter_id,
        "kind": letter.kind.value,
        "error": letter.error[:HISTORY_ERROR].encode("utf-8", "replace").decode(),
        "timestamp": letter.timestamp,
        "attempt_count": letter.attempt_count,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "message_timestamp": message.timestamp,
    }
