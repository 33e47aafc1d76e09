"""A consumer's place in its group, by which brokers judge whether it may still commit: generation and member id.

A transaction takes its place once, when it begins, while every partition in it is owned. A cooperative group gives a
partition to another member only in a later generation, after this member revoked it or was expelled, and brokers reject
offsets of an earlier generation. So a transaction that outlives its ownership is never accepted, however late its
request arrives.

A consumer that was expelled, or whose client left the group, has no generation or no member id until it has joined
again. While the group is empty brokers accept offsets of such a place without any check, so no transaction may begin
with one.

A client that was expelled while it was joining (its process was stopped, say) joins as a new member and keeps what it
had: until it has to give those partitions up it has a valid place, and so has their next owner. So a transaction
begins only with partitions that were assigned to the member of its place.
"""

from __future__ import annotations

import struct

# librdkafka's own form (rd_kafka_consumer_group_metadata_write): magic, int32 in the machine's order, then strings,
# each ended by NUL: group, member.
_MAGIC = b"CGMDv2:"
_GENERATION = struct.Struct("=i")


def is_member(place: object) -> bool:
    """Tell whether a place (`Consumer.consumer_group_metadata()`) is that of a member of the group.

    One in an unknown form counts as such; the brokers judge it.

    Example:
        >>> is_member(b"CGMDv2:" + _GENERATION.pack(7) + b"group\\0member-1\\0\\0instance\\0")
        True
        >>> is_member(b"CGMDv2:" + _GENERATION.pack(-1) + b"group\\0\\0\\0instance\\0")
        False
    """
    member = read_member_id(place)
    if member is None or not isinstance(place, bytes):
        return place is not None
    (generation,) = _GENERATION.unpack_from(place, len(_MAGIC))
    return generation >= 0 and bool(member)


def read_member_id(place: object) -> bytes | None:
    """Return the member id in a place, b"" while there is none; None for an unknown form.

    Example:
        >>> read_member_id(b"CGMDv2:" + _GENERATION.pack(7) + b"group\\0member-1\\0\\0instance\\0")
        b'member-1'
    """
    if not isinstance(place, bytes) or not place.startswith(_MAGIC):
        return None
    return place[len(_MAGIC) + _GENERATION.size :].split(b"\0", 2)[1]
