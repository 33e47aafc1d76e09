"""A snapshot of a pipeline's partitions, in pages; partitions in trouble come first.

Invariants: work over all partitions is done once per snapshot, for all clients together; only the rows of a page are
described. A page continues after the sort key of the previous page's last row. While lags change, a partition may
therefore appear on two pages or on none.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from fastapi import Depends, Query

from tidemill.config.redaction import redact_text
from tidemill.core.recorder.cursor import Key, WrongCursorError, decode_cursor, encode_cursor
from tidemill.runtime.link.progress import PartitionHead, find_stalled_partitions, name_stalled_partition
from tidemill.spark.progress import PipelineProgress
from tidemill.web.pipeline import models
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import parse_number, parse_words

#: The number of partitions on the overview.
SHOWN = 20
STATES = ("stalled", "held", "backpressure", "paused")
ORDERS = ("worst", "name")
#: The types of the fields of a row's sort key, by order.
_KINDS: Mapping[str, tuple[type[int] | type[str], ...]] = {"worst": (int, int, str, int), "name": (str, int)}


@dataclass(frozen=True, slots=True)
class PartitionQuery:
    """A query for partitions.

    Attributes:
        engine: The slot of the owning engine; None: any.
        state: One of `STATES`; '': any.
        name: A part of the partition's name.
        order: worst: stalled partitions first, then the largest lag; name: by topic and number.
    """

    engine: int | None = None
    state: str = ""
    name: str = ""
    order: str = ORDERS[0]

    def describe(self) -> str:
        """Return a text that identifies the query."""
        return repr((self.engine, self.state, self.name, self.order))


def read_partitions(
    engine: Annotated[str, Query(max_length=20, description="The slot of the owning engine.")] = "",
    state: Annotated[str, Query(max_length=20, description=", ".join(STATES))] = "",
    name: Annotated[str, Query(max_length=300, description="A part of the partition's name.")] = "",
    order: Annotated[
        str, Query(max_length=20, description="worst: stalled partitions, then the largest lag; name: by name.")
    ] = "",
) -> PartitionQuery:
    """Return the query for partitions from query parameters."""
    slot = parse_number("engine", engine, int)
    chosen = parse_words("state", [state], STATES)
    orders = parse_words("order", [order], ORDERS)
    return PartitionQuery(
        None if slot is None else int(slot), chosen[0] if chosen else "", name, orders[0] if orders else ORDERS[0]
    )


PartitionFilters = Annotated[PartitionQuery, Depends(read_partitions)]


class PartitionTable:
    """A snapshot of all partitions that engines own.

    Args:
        progress: The totals at that moment.
        before: The table of an earlier moment; its order by name is reused if the partitions are the same list.
    """

    def __init__(self, progress: PipelineProgress, before: PartitionTable | None = None) -> None:
        self._progress = progress
        self._keys: Sequence[Key]
        self._names: Sequence[str]
        if before is not None and before._progress.partitions is progress.partitions:
            self._keys, self._names = before._keys, before._names
        else:
            self._keys = sorted(map(split_name, progress.partitions))
            self._names = list(map(_name, self._keys))
        self._owners = {
            name: engine
            for engine in progress.engines
            if engine.progress is not None
            for name in engine.progress.partitions
        }
        self._stalled = find_stalled_partitions(progress.waits)
        self._paused = set(progress.paused)
        self._paused_by_user = {pause.partition for pause in progress.pauses}
        self._ranked: list[Key] | None = None

    @property
    def count(self) -> int:
        """The number of partitions."""
        return len(self._progress.partitions)

    def count_stalled(self) -> int:
        """Return the number of stalled partitions."""
        return sum(name in self._stalled for name in self._progress.partitions)

    def list_first(self, most: int = SHOWN) -> list[models.Partition]:
        """Return all partitions by name, or if there are too many, the worst ones in the order of `find`."""
        if self.count <= most:
            return [self._describe(name) for name in self._names]
        lags = dict.fromkeys(self._names, 0) | self._progress.lag
        stalled = [name for name in self._names if name in self._stalled] if self._stalled else []
        first = heapq.nlargest(most, stalled, lags.__getitem__)
        others = (name for name in self._names if name not in self._stalled)
        first += heapq.nlargest(most - len(first), others, lags.__getitem__)
        return [self._describe(name) for name in first]

    def find(self, query: PartitionQuery, cursor: str, limit: int) -> models.PartitionPage:
        """Return a page of partitions.

        Args:
            query: The filters and the order.
            cursor: The cursor of the previous page; '': the first page.
            limit: The maximum number of rows.

        Raises:
            Problem: The cursor is invalid.
        """
        keys, text = self._sort(query.order), f"partitions {query.describe()}"
        matching = [key for key in keys if self._matches(_name(key), query)]
        begin = 0
        if cursor:
            try:
                begin = bisect_right(matching, decode_cursor(cursor, text, _KINDS[query.order]))
            except WrongCursorError as error:
                raise RequestProblem(422, f"cursor: {error}") from error
        found = list(islice(matching, begin, begin + limit))
        is_last = begin + limit >= len(matching)
        return models.PartitionPage(
            rows=[self._describe(_name(key)) for key in found],
            cursor=None if is_last else encode_cursor(text, found[-1]),
            before=begin,
            matching=len(matching),
            total=self.count,
        )

    def _sort(self, order: str) -> Sequence[Key]:
        if order == "name":
            return self._keys
        if self._ranked is None:
            stalled, lags = self._stalled, self._progress.lag
            # A partition with unknown lag comes after those with lag.
            self._ranked = sorted(
                (int(name not in stalled), -lags.get(name, 0), *key)
                for name, key in zip(self._names, self._keys, strict=True)
            )
        return self._ranked

    def _matches(self, name: str, query: PartitionQuery) -> bool:
        owner = self._owners.get(name)
        if query.name not in name or (query.engine is not None and (owner is None or owner.slot != query.engine)):
            return False
        match query.state:
            case "stalled":
                return name in self._stalled
            case "held":
                head = self._progress.heads.get(name)
                return head is not None and bool(head.stage)
            case "backpressure":
                return name in self._paused
            case "paused":
                return self._is_paused_by_user(name)
        return True

    def _is_paused_by_user(self, name: str) -> bool:
        return None in self._paused_by_user or split_name(name)[1] in self._paused_by_user

    def _describe(self, name: str) -> models.Partition:
        progress, owner = self._progress, self._owners.get(name)
        # Counts of the current owner only: an earlier owner gave up its uncommitted messages.
        flow: Mapping[str, tuple[int, int, int]] = owner.progress.flow if owner and owner.progress else {}
        taken, committed, given_up = flow.get(name, (0, 0, 0))
        stalled = progress.waits.get(name_stalled_partition(name))
        return models.Partition(
            name=name,
            engine=owner.slot if owner is not None else None,
            lag=progress.lag.get(name),
            consumed=progress.flow.get(name, (0, 0, 0))[0],
            uncommitted=max(0, taken - committed - given_up),
            committed_offset=progress.committed.get(name),
            is_paused=name in self._paused,
            is_paused_by_user=self._is_paused_by_user(name),
            stalled=None if stalled is None else redact_text(stalled),
            held_by=_describe_held(name, progress.heads.get(name)),
        )


def _describe_held(name: str, head: PartitionHead | None) -> models.Held | None:
    topic, number = split_name(name)
    if head is None or head.offset < 0 or number < 0:
        return None
    return models.Held(
        topic=topic,
        partition=number,
        offset=head.offset,
        since=head.since,
        written_at=head.written_at,
        stage=head.stage,
        text=redact_text(head.text),
        buffered=head.buffered,
    )


def split_name(name: str) -> tuple[str, int]:
    """Return the topic and the number of a partition; the number is -1 if the text is not a partition's name.

    Example:
        >>> split_name("orders/12"), split_name("orders")
        (('orders', 12), ('orders', -1))
    """
    topic, _, number = name.rpartition("/")
    return (topic, int(number)) if number.isdecimal() else (name, -1)


def _name(key: Key) -> str:
    """Return the name of a partition by its sort key, which ends with topic and number."""
    *_, topic, number = key
    return str(topic) if number == -1 else f"{topic}/{number}"
