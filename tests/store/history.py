"""A long history in a store, and what each statement of the store costs beside it."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Table, event, func, select, text

from tidemill.store import queries, statements
from tidemill.store.batches import find_dialect
from tidemill.store.dag_tables import (
    dag_run,
    map_identity,
    map_item,
    task_callback,
    task_instance,
    task_iteration,
    task_journal,
    task_log,
    task_map,
    task_part,
    task_state,
    xcom,
)
from tidemill.store.database import Database
from tidemill.store.tables import (
    service_session,
    trigger,
    trigger_cursor,
    trigger_event,
    trigger_identity,
    trigger_stream,
)

#: Numbers of copies are far above those of what is copied, and of what comes later.
_FIRST = 1_000_000
#: How many copies one transaction makes.
_PART = 500
#: Tables that grow with each run, and the columns by which their rows refer to others.
GROWING: dict[Table, dict[str, Table]] = {
    dag_run: {"id": dag_run},
    task_instance: {"id": task_instance, "run": dag_run},
    task_journal: {"task": task_instance},
    xcom: {"task": task_instance},
    task_state: {"task": task_instance},
    task_log: {"task": task_instance},
    task_callback: {"id": task_callback, "run": dag_run, "task": task_instance},
    trigger: {"id": trigger, "task_id": task_instance},
    trigger_cursor: {"trigger_id": trigger},
    trigger_event: {"id": trigger_event, "trigger_id": trigger},
    service_session: {"id": service_session},
}
#: Further tables that can have very many rows.
MORE: dict[Table, dict[str, Table]] = {
    task_map: {"task": task_instance, "run": dag_run},
    map_item: {"task": task_instance},
    map_identity: {"task": task_instance},
    task_iteration: {"task": task_instance},
    task_part: {"task": task_instance},
    trigger_stream: {"trigger_id": trigger, "task": task_instance},
    trigger_identity: {"trigger_id": trigger},
}
#: Progress is counted in this many steps of SQLite's virtual machine.
_STEPS = 20


async def copy_history(database: Database, times: int, tables: Mapping[Table, dict[str, Table]] = GROWING) -> None:
    """Copy all that is in the growing tables this many times; everything there has ended."""
    sizes = await database.write(lambda connection: {table: _find_size(connection, table) for table in GROWING})
    for first in range(1, times + 1, _PART):
        last = min(first + _PART, times + 1) - 1
        await database.write(
            lambda connection, first=first, last=last: _copy_part(connection, tables, sizes, first, last)  # type: ignore[misc]
        )
    await database.write(_finish)


def _copy_part(
    connection: Connection,
    tables: Mapping[Table, dict[str, Table]],
    sizes: dict[Table, int],
    first: int,
    last: int,
) -> None:
    copies = f"WITH RECURSIVE c(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM c WHERE i < {last})"
    for table, refers in tables.items():
        names = [column.name for column in table.columns]
        listed = ", ".join(f'"{name}"' for name in names)
        values = ", ".join(_copy_column(table, name, refers, sizes) for name in names)
        old = f't."{next(iter(refers))}" < {_FIRST}'
        said = f'INSERT INTO "{table.name}" ({listed}) {copies} SELECT {values} FROM "{table.name}" t, c WHERE {old}'
        connection.execute(text(said))


def _finish(connection: Connection) -> None:
    if find_dialect(connection) == "postgresql":
        for table in GROWING:
            _set_sequence(connection, table)
        connection.execute(text("ANALYZE"))


def _find_size(connection: Connection, table: Table) -> int:
    column = next(iter(table.primary_key.columns))
    return int(connection.execute(select(func.coalesce(func.max(column), 0))).scalar_one()) + 1


def _copy_column(table: Table, name: str, refers: dict[str, Table], sizes: dict[Table, int]) -> str:
    if name in refers:
        return f't."{name}" + {_FIRST} + c.i * {sizes[refers[name]]}'
    if table is dag_run and name == "run_id":
        return "t.run_id || '-' || c.i"
    if table is dag_run and name == "logical_us":
        return "t.logical_us - c.i * CAST(1000000 AS BIGINT)"
    if table is dag_run and name == "request":
        return "NULL"
    return f't."{name}"'


def _set_sequence(connection: Connection, table: Table) -> None:
    if "id" in table.c:
        name = connection.execute(text(f"SELECT pg_get_serial_sequence('{table.name}', 'id')")).scalar_one()
        connection.execute(text(f"SELECT setval('{name}', (SELECT max(id) FROM {table.name}))"))


async def copy_elements(database: Database, run: int, task_id: str, count: int) -> None:
    """Add this many elements to a task of a run, as copies of the task's own row."""

    def copy(connection: Connection) -> None:
        names = [column.name for column in task_instance.columns if column.name != "id"]
        values = ["c.i" if name == "map_index" else f't."{name}"' for name in names]
        numbers = f"WITH RECURSIVE c(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM c WHERE i < {count - 1})"
        listed = ", ".join(f'"{name}"' for name in names)
        selected = f"SELECT {', '.join(values)} FROM task_instance t, c"
        own = f"t.run = {run} AND t.task_id = '{task_id}' AND t.map_index = -1"
        connection.execute(text(f"INSERT INTO task_instance ({listed}) {numbers} {selected} WHERE {own}"))
        head = f"SELECT t.id, t.run, t.task_id, 1, {count}, {count} FROM task_instance t"
        counts = "task, run, task_id, opened, created, made"
        connection.execute(text(f"INSERT INTO task_map ({counts}) {head} WHERE {own}"))
        if find_dialect(connection) == "postgresql":
            connection.execute(text("ANALYZE task_instance"))

    await database.write(copy)


class Costs:
    """What statements cost, by their text.

    Attributes:
        steps: The most steps that SQLite took for one.
        scans: Those that read a growing table from one end to the other, with their plans.
        total: All steps.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.scans: dict[str, str] = {}
        self.total = 0
        self._current, self._count = "", 0

    def note_progress(self) -> int:
        self._count += _STEPS
        return 0

    def begin(self, said: str) -> None:
        self.end()
        self._current = said

    def end(self) -> None:
        self.steps[self._current] = max(self.steps[self._current], self._count)
        self.total += self._count
        self.sums[self._current] += self._count
        self._count = 0


@contextmanager
def watch_costs(patch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Watch all statements within the block, those that are compiled once included."""
    costs = Costs()
    execute_text: Callable[..., Any] = statements.execute_text

    def execute(connection: Connection, said: str, values: Any = ()) -> Any:
        _note(costs, connection.connection, find_dialect(connection), said, values)
        return execute_text(connection, said, values)

    def before(connection: Connection, cursor: Any, said: str, values: Any, context: Any, many: bool) -> None:
        if not many:
            _note(costs, connection.connection, find_dialect(connection), said, values)

    patch.setattr(statements, "execute_text", execute)
    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield costs
    finally:
        costs.end()
        event.remove(Engine, "before_cursor_execute", before)
        patch.setattr(statements, "execute_text", execute_text)


def _note(costs: Costs, connection: Any, dialect: str, said: str, values: Any) -> None:
    if dialect == "sqlite":
        connection.driver_connection.set_progress_handler(costs.note_progress, _STEPS)
        costs.begin(said)
    elif said.lstrip().upper().startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
        cursor = connection.cursor()
        cursor.execute(f"EXPLAIN {said}", values)
        plan = "\n".join(row[0] for row in cursor.fetchall())
        cursor.close()
        if any(f"Seq Scan on {table.name} " in plan or f'Seq Scan on "{table.name}" ' in plan for table in GROWING):
            costs.scans[said] = plan


@contextmanager
def watch_rows(patch: pytest.MonkeyPatch, table: Table) -> Iterator[Counter[str]]:
    """Count the rows of a table that PostgreSQL reads for each SELECT within the block."""
    rows: Counter[str] = Counter()
    execute_text: Callable[..., Any] = statements.execute_text

    def note(connection: Any, said: str, values: Any) -> None:
        if not said.lstrip().upper().startswith("SELECT"):
            return
        cursor = connection.cursor()
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {said}", values)
        rows[said] = max(rows[said], _count_rows(cursor.fetchall()[0][0][0]["Plan"], table.name))
        cursor.close()

    def execute(connection: Connection, said: str, values: Any = ()) -> Any:
        note(connection.connection, said, values)
        return execute_text(connection, said, values)

    def before(connection: Connection, cursor: Any, said: str, values: Any, context: Any, many: bool) -> None:
        if not many:
            note(connection.connection, said, values)

    patch.setattr(statements, "execute_text", execute)
    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield rows
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        patch.setattr(statements, "execute_text", execute_text)


def _count_rows(plan: dict[str, Any], table: str) -> int:
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if plan.get("Relation Name") == table else 0
    return int(own * plan["Actual Loops"]) + sum(_count_rows(part, table) for part in plan.get("Plans", ()))


#: An equality between the columns of two relations, or of a column with one of given values.
_COMPARED = re.compile(r"\(?\b(\w+)\.(\w+)\)?(?:::\w+)? = (?:ANY|\(?(\w+)\.(\w+)\b\)?)")


@dataclass(frozen=True)
class Indexes:
    """The large tables of a PostgreSQL database, and the indexes of all.

    Attributes:
        large: The names of the tables that have many rows.
        keys: The columns of each index that has all rows of its table; those of rows in some state have few.
    """

    large: frozenset[str]
    keys: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class KeptPlan:
    """A plan as PostgreSQL keeps it: made once, without the values of the parameters."""

    said: str
    root: dict[str, Any]

    def find_faults(self, indexes: Indexes) -> list[str]:
        """Return the steps that may read most of a large table, once or for each given row."""
        scans: dict[str, bool] = {}
        faults: list[str] = []
        self._look(self.root, indexes, scans, faults)
        return faults

    def _look(self, node: dict[str, Any], indexes: Indexes, scans: dict[str, bool], faults: list[str]) -> None:
        """Add the faults of a step; `scans` gets, by alias, whether a scan finds rows by a whole key."""
        inner: dict[str, bool] = {}
        for part in node.get("Plans", ()):
            self._look(part, indexes, inner, faults)
        kind, table = node["Node Type"], node.get("Relation Name")
        if table in indexes.large and kind in ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Heap Scan"):
            paths = [each for each in (node, *_walk(node)) if "Index Name" in each]
            keys = [(indexes.keys.get(each["Index Name"], ()), each.get("Index Cond", "")) for each in paths]
            if not paths or any(key and not re.search(rf"\b{key[0]}\b", condition) for key, condition in keys):
                faults.append(f"it reads all of {table}")
            whole = all(re.search(rf"\b{name}\b", condition) for key, condition in keys for name in key)
            inner[node["Alias"]] = whole
        for condition in ("Join Filter", "Hash Cond", "Merge Cond", "Filter"):
            for one, column, other, _ in _COMPARED.findall(node.get(condition, "")):
                if not (inner.get(one, True) and inner.get(other, True)):
                    faults.append(f"{condition} of {kind}: {one}.{column} = {other or 'ANY'}")
        scans |= inner


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in node.get("Plans", ()):
        if "Relation Name" not in part:
            yield part
            yield from _walk(part)


def pretend_large(connection: Connection) -> Indexes:
    """Have PostgreSQL plan as if its growing tables had a million rows each; return these and the indexes of all."""
    for table in GROWING | MORE:
        connection.execute(text(f'ALTER TABLE "{table.name}" SET (autovacuum_enabled = false)'))
    own = "relnamespace = 'public'::regnamespace AND relpages > 0"
    named = ", ".join(f"'{table.name}'" for table in GROWING | MORE)
    said = f"UPDATE pg_class SET reltuples = 1000000 WHERE {own} AND relname IN ({named}) RETURNING relname"
    large = frozenset(name for (name,) in connection.execute(text(said)))
    indexes = f"SELECT indexrelid FROM pg_index WHERE indrelid::regclass::text IN ({named}) AND indpred IS NULL"
    connection.execute(text(f"UPDATE pg_class SET reltuples = 1000000 WHERE {own} AND oid IN ({indexes})"))
    columns = (
        "SELECT c.relname, array_agg(a.attname::text ORDER BY k.n) FROM pg_index i JOIN pg_class c ON c.oid = "
        "i.indexrelid CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k(number, n) JOIN pg_attribute a ON "
        "a.attrelid = i.indrelid AND a.attnum = k.number WHERE i.indpred IS NULL GROUP BY c.relname"
    )
    return Indexes(large, {name: tuple(names) for name, names in connection.execute(text(columns))})


def plan_kept(connection: Any, said: str) -> KeptPlan:
    """Have PostgreSQL plan a statement as it would keep it; the connection is one of the driver's."""
    number = max((int(one) for one in re.findall(r"\$(\d+)", said)), default=0)
    given = f"({', '.join(['NULL'] * number)})" if number else ""
    cursor = connection.cursor()
    cursor.execute(f"PREPARE looked_at AS {said}")
    cursor.execute(f"EXPLAIN (FORMAT JSON, VERBOSE) EXECUTE looked_at{given}")
    plan = KeptPlan(said, cursor.fetchall()[0][0][0]["Plan"])
    cursor.execute("DEALLOCATE looked_at")
    cursor.close()
    return plan


def plan_statements(connection: Connection, known: Mapping[str, KeptPlan]) -> dict[str, KeptPlan]:
    """Return the kept plans of the statements that the store compiles once, without those that are known."""
    found = {}
    for info in pkgutil.walk_packages(queries.__path__, f"{queries.__name__}."):
        for one in vars(importlib.import_module(info.name)).values():
            if isinstance(one, statements.Statement):
                variants = len(inspect.signature(one._build).parameters) - 1
                for variant in itertools.product((False, True), repeat=variants):
                    built: Any = one._build("postgresql", *variant)
                    said = str(built.compile(dialect=connection.dialect))
                    if said not in known:
                        found[said] = plan_kept(connection.connection, said)
    return found


@contextmanager
def watch_plans(patch: pytest.MonkeyPatch) -> Iterator[dict[str, KeptPlan]]:
    """Get the kept plan of each statement that PostgreSQL executes within the block in a transaction that writes."""
    plans: dict[str, KeptPlan] = {}
    execute_text: Callable[..., Any] = statements.execute_text

    def note(connection: Any, said: str) -> None:
        if said in plans or not said.lstrip().upper().startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")):
            return
        cursor = connection.cursor()
        cursor.execute("SHOW plan_cache_mode")
        if cursor.fetchone()[0] == "force_generic_plan":
            plans[said] = plan_kept(connection, said)
        cursor.close()

    def execute(connection: Connection, said: str, values: Any = ()) -> Any:
        note(connection.connection, said)
        return execute_text(connection, said, values)

    def before(connection: Connection, cursor: Any, said: str, values: Any, context: Any, many: bool) -> None:
        note(connection.connection, said)

    patch.setattr(statements, "execute_text", execute)
    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield plans
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        patch.setattr(statements, "execute_text", execute_text)
