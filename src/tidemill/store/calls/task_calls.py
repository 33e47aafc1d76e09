"""The calls that attempts make through their worker: XComs, state, variables, connections, logs.

Invariants: every write of an attempt carries its epoch and is refused (FENCED) if the epoch is stale. All calls may be
repeated. Values are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, answered_by
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.worker_calls import LogPart

#: The maximum size of an encoded XCom value, in bytes.
MAX_XCOM_BYTES = 1024 * 1024


@answered_by("dags.values.xcoms:get_xcoms", reads=True)
class GetXCom(Call[tuple[str | None, ...]], frozen=True):
    """Return the XComs of the given tasks, in the same order; None where there is none.

    Attributes:
        run: The row id of the run to read from, unless `dag_id` or `run_id` name another.
        task_ids: The tasks, by name.
        key: The key.
        map_index: The map index; -1: tasks that are not mapped.
        include_prior: Whether to fall back to the latest earlier run that has such an XCom.
        dag_id: Another DAG to read from: its latest run up to the logical date of `run`, unless `run_id` is given.
        run_id: Another run to read from.
    """

    run: int
    task_ids: tuple[str, ...]
    key: str = "return_value"
    map_index: int = -1
    include_prior: bool = False
    dag_id: str | None = None
    run_id: str | None = None


@answered_by("dags.runs.runs:get_earlier_run", reads=True)
class GetEarlierRun(Call[RunRecord | None], frozen=True):
    """Return the run of the same DAG with the latest logical date before the given run; None if there is none.

    Attributes:
        run: The run; a run without a logical date has no earlier run.
        state: Only runs in this state; None: in any state.
    """

    run: int
    state: str | None = None


@answered_by("dags.values.task_values:push_xcom")
class PushXCom(Call[None], frozen=True):
    """Store an XCom of an attempt immediately; at most MAX_XCOM_BYTES."""

    task: int
    epoch: int
    key: str
    value: str


class ItemsStored(msgspec.Struct, frozen=True):
    """The answer to `EmitItems`.

    Attributes:
        total: The number of items that are stored now.
        wanted: Whether a mapped task still takes items; if not, the generator ends.
        full: Whether enough items are stored that no element has taken yet: the generator waits at its next `yield`.
    """

    total: int
    wanted: bool
    full: bool = False


@answered_by("dags.items.items:emit_items")
class EmitItems(Call[ItemsStored], frozen=True):
    """Store the values that a generator task yielded; the tasks mapped over it get elements for them.

    Values that are stored already are skipped if they are equal, because a generator begins again in each try; a
    different value, one of more than MAX_XCOM_BYTES, or a gap is refused (INVALID), and the attempt must fail without
    a retry.

    Attributes:
        task: The generator's task.
        epoch: The epoch of its attempt.
        first: The number of the first value among all that this try yields, from 0.
        values: The encoded values.
    """

    task: int
    epoch: int
    first: int
    values: tuple[str, ...]


@answered_by("dags.items.long_lists:store_list_part")
class StoreListPart(Call[None], frozen=True):
    """Store a part of a list that is larger than an XCom, because tasks are mapped over it.

    Parts come in order. A value in place of another one replaces it; the last part removes what is beyond the end.

    Attributes:
        task: The task that returned the list.
        epoch: The epoch of its attempt.
        key: The key of its XCom.
        first: The number of the first value, from 0.
        values: The encoded values, at most MAX_XCOM_BYTES each.
        total: The length of the list.
    """

    task: int
    epoch: int
    key: str
    first: int
    values: tuple[str, ...]
    total: int


class ValuePage(msgspec.Struct, frozen=True):
    """A page of the values of a mapped task or of a generator.

    Attributes:
        total: The number of all values; None: it was not asked for.
        values: Map index and encoded value, by index.
    """

    total: int | None
    values: tuple[tuple[int, str], ...]


@answered_by("dags.items.value_pages:get_value_page", reads=True)
class GetValuePage(Call[ValuePage], frozen=True):
    """Return stored values in the order of their indexes: results of the successful elements of a mapped task, or what
    a generator yielded. A page ends at 1,000 values or 8 MiB, and has at least one value if there is one.

    Attributes:
        run: The row id of the run to read from, unless `dag_id` or `run_id` name another.
        task_id: The mapped task or the generator; empty: the values are a list in the configuration of the run that was
            stored item by item.
        key: The key of the XCom, or the name of the list.
        after: Only values with a higher index.
        offset: The number of values to skip after that.
        limit: The maximum number of values.
        dag_id: Another DAG to read from: its latest run up to the logical date of `run`, unless `run_id` is given.
        run_id: Another run to read from.
        count: Whether to count all values; that reads all of them, so ask once.
        map_index: The element that yielded the values, for a generator of a mapped group; otherwise None.
    """

    run: int
    task_id: str
    key: str = "return_value"
    after: int = -1
    offset: int = 0
    limit: int = 1000
    dag_id: str | None = None
    run_id: str | None = None
    count: bool = False
    map_index: int | None = None


class MapItem(msgspec.Struct, frozen=True):
    """What an item of a chunk is made of.

    Attributes:
        number: Its number among all items of the map, from 0.
        leaf_indexes: The index of the item per leaf; -1: the part of a zip has ended and is filled.
        elements: Per leaf, the encoded item; see `ClaimedAttempt.elements`.
    """

    number: int
    leaf_indexes: tuple[int, ...]
    elements: tuple[str | None, ...]


@answered_by("dags.items.parts:get_chunk_items", reads=True)
class GetChunkItems(Call[tuple[MapItem, ...]], frozen=True):
    """Return items of a chunk, in order; none: there are no more.

    Attributes:
        task: The element.
        after: Only items with a higher number.
        limit: The maximum number of items; a page ends at 8 MiB, too, and has at least one item if there is one.
        part: The chunk, if one element of the task runs all of them; None: that of the element.
    """

    task: int
    after: int = -1
    limit: int = 1000
    part: int | None = None


@answered_by("dags.values.task_values:get_variable", reads=True)
class GetVariable(Call[str | None], frozen=True):
    """Return the value of a variable; None if there is none."""

    key: str


@answered_by("dags.values.task_values:set_variable")
class SetVariable(Call[None], frozen=True):
    """Store a variable. `description`: None keeps the current one."""

    key: str
    value: str
    description: str | None = None


@answered_by("dags.values.task_values:delete_variable")
class DeleteVariable(Call[bool], frozen=True):
    """Delete a variable; False if there was none."""

    key: str


class ConnectionRecord(msgspec.Struct, frozen=True):
    """A connection. `extra`: JSON text."""

    id: str
    kind: str
    host: str | None = None
    schema: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    extra: str | None = None
    description: str | None = None


@answered_by("dags.values.task_values:get_connection", reads=True)
class GetConnection(Call[ConnectionRecord | None], frozen=True):
    """Return a connection with its secrets; None if there is none."""

    id: str


@answered_by("dags.values.task_values:get_task_state")
class GetTaskState(Call[str | None], frozen=True):
    """Return a value that a task stored for its later tries; None if there is none."""

    task: int
    epoch: int
    key: str


@answered_by("dags.values.task_values:set_task_state")
class SetTaskState(Call[None], frozen=True):
    """Store a value for later tries of the task."""

    task: int
    epoch: int
    key: str
    value: str


@answered_by("dags.values.task_values:delete_task_state")
class DeleteTaskState(Call[bool], frozen=True):
    """Delete a value that a task stored for its later tries; False if there was none."""

    task: int
    epoch: int
    key: str


@answered_by("dags.values.task_values:clear_task_state")
class ClearTaskState(Call[int], frozen=True):
    """Delete all values that a task stored for its later tries; return their number."""

    task: int
    epoch: int


@answered_by("dags.views.task_logs:append_log")
class AppendLog(Call[None], frozen=True):
    """Store log parts; a part that is already stored stays unchanged."""

    parts: tuple[LogPart, ...]
