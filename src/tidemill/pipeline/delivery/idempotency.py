"""Sets the idempotency key of payloads: the same key when the same messages are reprocessed.

A key is a digest of the payload's origin: the consumer group, the hook, the task's id, the positions and contents of
the messages, and the payload's index in the hook's result. Invariants: the digest contains nothing that differs between
two runs over the same messages (except a task's id, if the handler generates a new one each time). A key that a hook
set stays. Dead letters carry the key, so that a redriven payload has the same key.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from tidemill.pipeline.delivery.routing import Origin, RoutedPayload
from tidemill.sinks.sending.delivery_batch import BatchPart

#: 128 bits, like a random UUID.
_DIGEST_BYTES = 16


def name_payloads(routed: Sequence[RoutedPayload], origin: Origin | BatchPart, group: str) -> None:
    """Set the key of each payload that has none and whose sink sends one.

    Args:
        routed: All payloads that a hook returned, in order.
        origin: The messages and the task; without messages no key is set, because nothing is ever reprocessed.
        group: The consumer group, which distinguishes two pipelines over one topic.
    """
    if not origin.sources:
        return
    digest = ""
    for index, each in enumerate(routed):
        # Sinks of other packages may accept payloads with and without the field.
        if each.sender.sink.takes_idempotency_key and getattr(each.payload, "idempotency_key", None) == "":
            digest = digest or _make_digest(origin, group)
            # Not `replace`, which would run a `__post_init__` of the user's class again.
            each.payload = copy.copy(each.payload)
            msgspec.structs.force_setattr(each.payload, "idempotency_key", f"{digest}-{index}")


def _make_digest(origin: Origin | BatchPart, group: str) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in _list_parts(origin, group):
        # The length prefix separates parts. Contents are included because a recreated topic reuses offsets.
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.hexdigest()


def _list_parts(origin: Origin | BatchPart, group: str) -> Iterator[bytes | None]:
    yield from (group.encode(), origin.hook.encode())
    yield None if origin.task is None else origin.task.task_id.encode()
    for source in origin.sources:
        yield f"{source.topic}/{source.partition}/{source.offset}/{source.timestamp}".encode()
        yield source.key
        yield source.value
