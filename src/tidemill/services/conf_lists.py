"""Sends the long lists in the configuration of a run to the store, if tasks are mapped over them.

A list is sent value by value before the run is created. The configuration has a mark in its place, so that attempts do
not get the list; `dag_run.conf` reads it in pages.

Invariant: the values of a list are checked against the schema of its param here, before they are sent; the store checks
the length of the list.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.structure import DagStructure
from tidemill.dags.long_lists import MAX_LIST_BYTES, build_mark, split_parts
from tidemill.runtime.json.codec import encode
from tidemill.runtime.json.schema import SchemaError, find_item_mismatch, find_length_mismatch, measures_large
from tidemill.store.calls.call import Call
from tidemill.store.calls.run_calls import StageConfItems

T = TypeVar("T")

#: A shorter list is part of the configuration like any other value.
MIN_LIST_BYTES: Final = 64 * 1024


class _Asks(Protocol):
    def __call__(self, call: Call[T]) -> T: ...


class SentConf(NamedTuple):
    """The configuration as `CreateRun` wants it: the encoded text, and the number of its lists."""

    text: str
    stage: int = 0


def send_lists(
    ask: _Asks, structure: DagStructure, conf: Mapping[str, Any], tell: Callable[[int, int], None]
) -> SentConf:
    """Send the lists that tasks of a DAG are mapped over, and return the rest.

    Args:
        ask: Asks the store.
        structure: The DAG.
        conf: The configuration.
        tell: Called with the number of values that have been sent, and that of all.

    Raises:
        ConfigError: A list is too large, or does not match the schema of its param.
    """
    lists: dict[str, list[str]] = {}
    for name in sorted(list_mapped_params(structure) & conf.keys()):
        values = conf[name]
        if isinstance(values, list):
            items = [encode(item, f"--conf[{name!r}][{number}]") for number, item in enumerate(values)]
            is_large = sum(map(len, items)) >= MIN_LIST_BYTES
            if is_large or (_find_schema(structure, name) != "{}" and measures_large(values)):
                check_values(structure, name, values, length=len(values))
                lists[name] = items
    size = sum(len(item.encode()) for items in lists.values() for item in items)
    if size > MAX_LIST_BYTES:
        raise ConfigError(
            f"the lists of --conf that tasks are mapped over have {size:,} bytes; at most {MAX_LIST_BYTES:,} are "
            "stored; pass a reference to larger data, or have a generator task read it"
        )
    rest = {name: value for name, value in conf.items() if name not in lists}
    text = encode(rest, "--conf")
    if not lists:
        return SentConf(text)
    stage = secrets.randbits(61) + 1
    done, total = 0, sum(map(len, lists.values()))
    for name, items in lists.items():
        first = 0
        for part in split_parts(items):
            ask(StageConfItems(stage, name, first, part))
            first += len(part)
            tell(done + first, total)
        done += len(items)
    return SentConf(mark_lists(text, {name: len(items) for name, items in lists.items()}), stage)


def mark_lists(conf: str, lengths: Mapping[str, int]) -> str:
    """Return an encoded configuration with marks for lists of these lengths, which it does not have yet."""
    if not lengths:
        return conf
    marks = ",".join(f"{encode(name)}:{build_mark(length)}" for name, length in lengths.items())
    return "{" + marks + ("}" if conf == "{}" else "," + conf[1:])


def list_mapped_params(structure: DagStructure) -> set[str]:
    """Return the params that tasks of a DAG are mapped over."""
    mapped = [task.mapped for task in structure.tasks if task.mapped is not None]
    return {leaf.key for each in mapped for leaf in each.leaves if leaf.kind == "param"}


def check_values(
    structure: DagStructure, name: str, values: Iterable[Any], first: int = 0, length: int | None = None
) -> None:
    """Check values of a list against the schema of its param.

    Args:
        structure: The DAG.
        name: The param.
        values: Some values of the list.
        first: The number of the first of them.
        length: The length of the whole list; None: it is not known yet.

    Raises:
        ConfigError: The values, or the length, do not match the schema.
    """
    schema = _find_schema(structure, name)
    if schema == "{}":
        return
    shown = f"param {name!r}"
    try:
        mismatch = "" if length is None else find_length_mismatch(schema, length, shown)
        mismatch = mismatch or find_item_mismatch(schema, values, shown, first)
    except SchemaError as error:
        raise ConfigError(f"{shown} cannot be checked against its schema: {error}") from None
    if mismatch:
        raise ConfigError(mismatch)


def _find_schema(structure: DagStructure, name: str) -> str:
    return next((param.schema for param in structure.params if param.name == name), "{}")
