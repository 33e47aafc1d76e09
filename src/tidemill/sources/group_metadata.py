"""The group metadata of a consumer (generation and member id), by which brokers decide whether it may still commit.

A transaction uses the metadata that is current when it begins, while every partition in it is owned. A cooperative
group assigns a partition to another member only in a later generation, after this member revoked it or was expelled,
and brokers reject offsets of an earlier generation. So a transaction that outlives its ownership is never accepted,
however late its request arrives.

A consumer that was expelled, or whose client left the group, has no generation or no member id until it rejoins. While
the group is empty, brokers accept offsets with such metadata without any check, so no transaction may begin with it.

A client that was expelled while it was joining (because its process was stopped, for example) joins as a new member and
keeps its partitions. Until it has to give them up its metadata is valid, and so is that of their next owner. So a
transaction begins only if its partitions were assigned to the member in its metadata.
"""

from __future__ import annotations

import struct

# librdkafka's own format (rd_kafka_consumer_group_metadata_write): magic, an int32 in native byte order, then strings
# that end with NUL: group, member.
_MAGIC = b"CGMDv2:"
_GENERATION = struct.Struct("=i")


def is_member(metadata: object) -> bool:
    r"""Return whether group metadata (`Consumer.consumer_group_metadata()`) is that of a current member.

    Metadata in an unknown format counts as such; the brokers check it.

    Example:
        >>> is_member(b"CGMDv2:" + _GENERATION.pack(7) + b"group\0member-1\0\0instance\0")
        True
        >>> is_member(b"CGMDv2:" + _GENERATION.pack(-1) + b"group\0\0\0instance\0")
        False
    """
    member = read_member_id(metadata)
    if member is None or not isinstance(metadata, bytes):
        return metadata is not None
    (generation,) = _GENERATION.unpack_from(metadata, len(_MAGIC))
    return generation >= 0 and bool(member)


def read_member_id(metadata: object) -> bytes | None:
    r"""Return the member id in group metadata, b"" while there is none; None for an unknown format.

    Example:
        >>> read_member_id(b"CGMDv2:" + _GENERATION.pack(7) + b"group\0member-1\0\0instance\0")
        b'member-1'
    """
    if not isinstance(metadata, bytes) or not metadata.startswith(_MAGIC):
        return None
    return metadata[len(_MAGIC) + _GENERATION.size :].split(b"\0", 2)[1]
