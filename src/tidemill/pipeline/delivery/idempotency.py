"""Names payloads, for sinks that send an idempotency key: the same one when the same work is done again.

A key is a digest of what the payload comes from: the consumer group, the hook, the task's id, the messages with their
places and contents, and the payload's place in what the hook returned. Invariants: nothing that differs between two
runs over the same messages is in it (but a task's id, where the handler makes a new one each time); a key that a hook
set stays. Letters carry the key, so that a payload that is sent again from one has it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tidemill.pipeline.delivery.outbox import Origin, Routed

#: 128 bits, as a random UUID has.
_DIGEST_BYTES = 16


def name_payloads(routed: Sequence[Routed], origin: Origin, group: str) -> None:
    """Set the key of each payload that has none and whose sink takes one.

    Args:
        routed: Everything that a hook returned, in order.
        origin: Where it comes from; without messages nothing is named, since nothing would come again.
        group: The consumer group: two pipelines over one topic do different work.
    """
    if not origin.sources:
        return
    digest = ""
    for index, each in enumerate(routed):
        # Sinks of other packages may take payloads with and without the field.
        if each.courier.sink.takes_idempotency_key and getattr(each.payload, "idempotency_key", None) == "":
            digest = digest or _digest(origin, group)
            each.payload = msgspec.structs.replace(each.payload, idempotency_key=f"{digest}-{index}")


def _digest(origin: Origin, group: str) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in _parts(origin, group):
        # Lengths keep parts apart; contents are there because a topic that is made again has its offsets again.
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.hexdigest()


def _parts(origin: Origin, group: str) -> Iterator[bytes | None]:
    yield from (group.encode(), origin.hook.encode())
    # Any text has bytes this way; lone surrogates are no reason to fail.
    yield None if origin.task is None else str(origin.task.task_id).encode("utf-8", "surrogatepass")
    for source in origin.sources:
        yield f"{source.topic}/{source.partition}/{source.offset}/{source.timestamp}".encode()
        yield source.key
        yield source.value
