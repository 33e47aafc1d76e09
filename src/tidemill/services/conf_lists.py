"""Sends the long lists in the configuration of a run to the store, if tasks are mapped over them.

A list is sent value by value before the run is created. The configuration has a mark in its place, so that attempts do
not get the list; `dag_run.conf` reads it in pages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.structure import DagStructure
from tidemill.dags.long_lists import MAX_LIST_BYTES, build_mark, split_parts
from tidemill.runtime.json.codec import encode
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
        ConfigError: A list is too large, or its param has a schema.
    """
    mapped = [task.mapped for task in structure.tasks if task.mapped is not None]
    names = {leaf.key for each in mapped for leaf in each.leaves if leaf.kind == "param"}
    lists: dict[str, list[str]] = {}
    for name in sorted(names & conf.keys()):
        values = conf[name]
        if isinstance(values, list):
            items = [encode(item, f"--conf[{name!r}][{number}]") for number, item in enumerate(values)]
            if sum(map(len, items)) >= MIN_LIST_BYTES:
                _check_no_schema(structure, name)
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
    marks = ",".join(f"{encode(name)}:{build_mark(len(items))}" for name, items in lists.items())
    return SentConf("{" + marks + ("," + text[1:] if rest else "}"), stage)


def _check_no_schema(structure: DagStructure, name: str) -> None:
    if any(param.name == name and param.schema != "{}" for param in structure.params):
        raise ConfigError(
            f"the list {name!r} of --conf has more than {MIN_LIST_BYTES:,} bytes and cannot be checked against the "
            "schema of its param; remove the schema, or pass a shorter list"
        )
