"""Encodes where the items of an open map are."""

from __future__ import annotations

import msgspec


class StoredSources(msgspec.Struct, frozen=True, array_like=True):
    """The sources of an open map, as `task_map.sources` has them.

    Attributes:
        owners: Per leaf, the task instance and the key of its items; None: they are in the DAG's file.
        lengths: Per leaf, the number of its items; 0 for a generator.
        factors: Per factor, the number of its items; 0 for a generator.
        failed: Whether a map that follows another one counts it as a failed source.
        never: How many elements of such a map never appeared, because it was stopped.
        since_us: When the first item of the unfinished chunk was seen; None: there is none.
        stale: Whether a source was cleared since they were read. They hold until it has ended.
    """

    owners: tuple[tuple[int, str] | None, ...]
    lengths: tuple[int, ...]
    factors: tuple[int, ...]
    failed: bool = False
    never: int = 0
    since_us: int | None = None
    stale: bool = False


#: The sources of a map that has not opened.
NO_SOURCES = StoredSources((), (), ())


def read_sources(text: str | None) -> StoredSources:
    """Decode `task_map.sources`."""
    return NO_SOURCES if text is None else msgspec.json.decode(text, type=StoredSources)


def write_sources(sources: StoredSources) -> str:
    """Encode `task_map.sources`."""
    return msgspec.json.encode(sources).decode()
