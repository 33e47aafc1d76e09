"""Makes attempts of tasks without processes and without a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.attempt.task_services import PageQuery, XComQuery
from tidemill.dags.execution.running import run_attempt
from tidemill.runtime.json.codec import decode, encode

LOGICAL_US = 1_767_225_600_000_000  # 2026-01-01


@dataclass(frozen=True)
class Resume:
    method: str
    kwargs: str
    payload: str


@dataclass(frozen=True)
class Callback:
    name: str
    error: str | None = None
    ended_us: int = LOGICAL_US + 9_000_000
    run_state: str = "running"
    run_ended_us: int | None = None
    started_us: int | None = LOGICAL_US + 6_000_000
    origin: str | None = None


@dataclass(frozen=True)
class Claim:
    dag_id: str
    task_id: str
    task: int = 7
    epoch: int = 3
    run_id: str = "run"
    map_index: int = -1
    try_number: int = 1
    max_tries: int = 3
    file: str = "file.py"
    queue: str = "default"
    run_kind: str = "manual"
    run_started_us: int = LOGICAL_US + 5
    logical_us: int | None = LOGICAL_US
    interval_start_us: int | None = LOGICAL_US
    interval_end_us: int | None = LOGICAL_US
    conf: str = "{}"
    params: str = "{}"
    deadline_us: int | None = None
    resume: Resume | None = None
    callback: Callback | None = None
    elements: tuple[str | None, ...] = ()
    leaf_indexes: tuple[int, ...] = ()
    map_length: int | None = None
    stream: Any = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class Page:
    total: int | None
    values: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ChunkItem:
    number: int
    leaf_indexes: tuple[int, ...]
    elements: tuple[str | None, ...]


@dataclass(frozen=True)
class Stored:
    total: int
    wanted: bool = True
    full: bool = False


@dataclass
class Services:
    """A store in memory."""

    task_id: str = ""
    xcoms: dict[tuple[str, str], str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    connections: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    earlier: Any = None
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    #: The indexes of the XComs that were read.
    indexes: list[int] = field(default_factory=list)
    #: The values of maps and generators, by task and key.
    sequences: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)
    pages: list[tuple[int, int]] = field(default_factory=list)
    page_values: int = 1_000
    #: The items of the element that is a chunk: per item, the index per leaf and the encoded item.
    items: list[tuple[tuple[int, ...], tuple[str | None, ...]]] = field(default_factory=list)
    #: The elements that one attempt runs.
    parts: Any = None
    #: The groups of values that generators emitted, each with its first index.
    emitted: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def get_xcom(self, query: XComQuery) -> tuple[str | None, ...]:
        task_ids, key, map_index, *others = query
        self.asked.append(tuple(others))
        self.indexes.append(map_index)
        if map_index >= 0:
            return tuple(dict(self.sequences.get((name, key), [])).get(map_index) for name in task_ids)
        return tuple(self.xcoms.get((task_id, key)) for task_id in task_ids)

    def get_page(self, query: PageQuery) -> Page:
        task_id, key, after, offset, limit, _, _, count, map_index = query
        self.pages.append((after, offset))
        if map_index is not None:
            task_id = f"{task_id}[{map_index}]"
        found = [(index, text) for index, text in self.sequences.get((task_id, key), []) if index > after]
        values = tuple(found[offset : offset + min(limit, self.page_values)])
        return Page(len(found) if count else None, values)

    def emit(self, first: int, values: tuple[str, ...]) -> Stored:
        self.emitted.append((first, values))
        return Stored(first + len(values))

    def store_list(self, key: str, first: int, values: tuple[str, ...], total: int) -> None:
        self.emitted.append((first, values))

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        raise AssertionError("there is room")

    def get_parts(self, after: int, limit: int) -> Any:
        return self.parts.get_parts(after, limit)

    def keep_parts(self, results: Any, seen: int, running: int) -> Any:
        return self.parts.keep_parts(results, seen, running)

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        self.parts.wait_for_elements(is_over)

    def get_chunk_items(self, after: int, limit: int = 1_000, part: int | None = None) -> list[ChunkItem]:
        page = list(enumerate(self.items))[after + 1 : after + 1 + min(limit, self.page_values)]
        return [ChunkItem(number, *item) for number, item in page]

    def get_earlier_run(self, state: str | None) -> Any:
        self.asked.append(("earlier", state))
        return self.earlier

    def get_run(self, dag_id: str, run_id: str) -> Any:
        return self.earlier if (dag_id, run_id) == ("d", "earlier") else None

    def push_xcom(self, key: str, value: str) -> None:
        self.xcoms[self.task_id, key] = value

    def get_variable(self, key: str) -> str | None:
        return self.variables.get(key)

    def set_variable(self, key: str, value: str, description: str | None = None) -> None:
        self.variables[key] = value

    def delete_variable(self, key: str) -> bool:
        return self.variables.pop(key, None) is not None

    def get_connection(self, conn_id: str) -> str | None:
        return self.connections.get(conn_id)

    def get_task_state(self, key: str) -> str | None:
        return self.state.get(key)

    def set_task_state(self, key: str, value: str) -> None:
        self.state[key] = value

    def delete_task_state(self, key: str) -> None:
        self.state.pop(key, None)

    def clear_task_state(self) -> None:
        self.state.clear()


def attempt(dag: Any, task_id: str, services: Services | None = None, **claim: Any) -> AttemptResult:
    """Make an attempt, and keep what it returns."""
    services = services or Services()
    services.task_id = task_id
    result = run_attempt(dag, Claim(dag.dag_id, task_id, **claim), services)
    services.xcoms.update({(task_id, key): value for key, value in result.xcoms})
    return result


def resume(dag: Any, task_id: str, deferred: AttemptResult, event: Any, **more: Any) -> AttemptResult:
    """Continue an attempt that was deferred."""
    ending = deferred.ending
    assert isinstance(ending, Deferral)
    return attempt(dag, task_id, resume=Resume(ending.method, ending.method_kwargs, encode(event)), **more)


def value_of(result: AttemptResult) -> Any:
    """Return what an attempt returned."""
    assert isinstance(result.ending, Success), result
    return decode(dict(result.xcoms).get("return_value", "null"))
