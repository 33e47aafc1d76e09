"""Names payloads for sinks that send an idempotency key: the same one when the same messages are reprocessed.

A key is a digest of what the payload comes from: the consumer group, the hook, the task's id, the messages with their
positions and contents, and the payload's index in what the hook returned. Invariants: nothing that differs between two
runs over the same messages is in it (except a task's id, where the handler generates a new one each time); a key that a
hook set stays. Letters carry the key, so that a payload that is redriven from one has it too.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from tidemill.pipeline.delivery.routing import Origin, Routed
from tidemill.sinks.sending.run import RunPart

#: 128 bits, as a random UUID has.
_DIGEST_BYTES = 16


def name_payloads(routed: Sequence[Routed], origin: Origin | RunPart, group: str) -> None:
    """Set the key of each payload that has none and whose sink sends one.

    Args:
        routed: Everything that a hook returned, in order.
        origin: Where it comes from; without messages nothing is named, since nothing is ever reprocessed.
        group: The consumer group, which tells two pipelines over one topic apart.
    """
    if not origin.sources:
        return
    digest = ""
    for index, each in enumerate(routed):
        # Sinks of other packages may accept payloads with and without the field.
        if each.sender.sink.takes_idempotency_key and getattr(each.payload, "idempotency_key", None) == "":
            digest = digest or _make_digest(origin, group)
            # Not `replace`, which would run a `__post_init__` of the user's class once more.
            each.payload = copy.copy(each.payload)
            msgspec.structs.force_setattr(each.payload, "idempotency_key", f"{digest}-{index}")


def _make_digest(origin: Origin | RunPart, group: str) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in _list_parts(origin, group):
        # Lengths keep parts apart; contents are there because a recreated topic starts over with its offsets.
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return digest.hexdigest()


def _list_parts(origin: Origin | RunPart, group: str) -> Iterator[bytes | None]:
    yield from (group.encode(), origin.hook.encode())
    # Any text can be encoded this way, lone surrogates included.
    yield None if origin.task is None else str(origin.task.task_id).encode("utf-8", "surrogatepass")
    for source in origin.sources:
        yield f"{source.topic}/{source.partition}/{source.offset}/{source.timestamp}".encode()
        yield source.key
        yield source.value
