"""Lists that are larger than an XCom: a task that others are mapped over stores them item by item.

The XCom of such a list is a mark; for tasks that read it, it is a `LazySequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tidemill.core.tasks.structure import MapSource
from tidemill.dags.attempt.current import get_services
from tidemill.dags.exceptions import TaskFailed
from tidemill.dags.xcom_arg import RETURN_VALUE
from tidemill.runtime.json.codec import encode

#: The limit of the store for one value.
_MAX_BYTES: Final = 1 << 20
#: The limit of a whole list that is stored in parts.
MAX_LIST_BYTES: Final = 64 << 20
_PART_VALUES, _PART_BYTES = 1_000, 4 << 20
_MARK: Final = '{"$tidemill":"items","value":'


def is_mark(text: str) -> bool:
    """Return whether an XCom stands for a list that was stored in parts."""
    return text.startswith(_MARK)


def encode_result(task: Any, result: Any) -> str:
    """Encode what a task returned; store a list larger than an XCom in parts if tasks are mapped over it.

    Raises:
        EncodingError: The value cannot be serialized.
        TaskFailed: The list, or one of its items, is too large.
    """
    text = encode(result, "the returned value")
    if len(text) * 4 <= _MAX_BYTES or not isinstance(result, list | tuple) or not _is_mapped_over(task):
        return text
    if _count_bytes(text) <= _MAX_BYTES:
        return text
    del text
    items = [encode(item, f"the returned value[{number}]") for number, item in enumerate(result)]
    _check_sizes(items)
    services = get_services()
    first = 0
    for part in split_parts(items):
        services.store_list(RETURN_VALUE, first, part, len(items))
        first += len(part)
    return build_mark(len(items))


def build_mark(length: int) -> str:
    """Return the text that stands for a list of this length."""
    return f"{_MARK}{length}}}"


def is_list_mark(value: object) -> bool:
    """Return whether a decoded value stands for a list that was stored in parts."""
    return type(value) is dict and value.keys() == {"$tidemill", "value"} and value["$tidemill"] == "items"


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _is_mapped_over(task: Any) -> bool:
    if task.dag is None:
        return False
    followers = [task.dag.task_dict[name] for name in task.downstream_task_ids]
    maps = [*(each for each in followers if each.is_mapped), *task.dag.mapped_groups]
    return any(task.task_id in _list_sources(each.factors) for each in maps)


def _list_sources(factors: Sequence[MapSource]) -> Iterator[str]:
    for factor in factors:
        yield from _list_sources(factor.parts)
        if factor.kind == "xcom" and factor.key == RETURN_VALUE:
            yield factor.task


def _check_sizes(items: Sequence[str]) -> None:
    total = 0
    for number, item in enumerate(items):
        size = _count_bytes(item)
        if size > _MAX_BYTES:
            raise TaskFailed(
                f"item {number} of the returned list has {size:,} bytes; at most {_MAX_BYTES:,} are stored; "
                "return a reference"
            )
        total += size
    if total > MAX_LIST_BYTES:
        raise TaskFailed(
            f"the returned list has {total:,} bytes; at most {MAX_LIST_BYTES:,} of a list that a task is mapped over "
            "are stored; yield the values instead of returning them, or return references"
        )


def split_parts(items: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield encoded values in parts, each of a size that one call to the store may have."""
    part: list[str] = []
    size = 0
    for item in items:
        if part and (len(part) >= _PART_VALUES or size + len(item) > _PART_BYTES):
            yield tuple(part)
            part, size = [], 0
        part.append(item)
        size += len(item)
    if part:
        yield tuple(part)
