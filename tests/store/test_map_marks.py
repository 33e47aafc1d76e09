"""Elements that end mark their map whenever the scheduler has something to do for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, delete, insert, select

from tidemill.core.tasks.expansion import Look, MapPolicy, MapRow, feed
from tidemill.store.dag_tables import task_map
from tidemill.store.queries.dags.state.map_rows import MapWrites, write_maps

COUNTS = ("waiting", "unfinished", "retrying", "success", "failed", "upstream_failed", "skipped")


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as opened:
        task_map.create(opened)
        yield opened


@st.composite
def rested(draw: Any) -> tuple[MapRow, MapPolicy]:
    """Return a map that a step has looked at, so that nothing is left to do for it, and its limits."""
    counts = {name: draw(st.integers(0, 2)) for name in COUNTS}
    created = sum(counts.values())
    policy = MapPolicy(draw(st.integers(1, 5)), draw(st.sampled_from([None, 0, 1, 3])))
    row = MapRow(True, draw(st.booleans()), created + draw(st.integers(0, 3)), created, **counts)
    kind = draw(st.sampled_from(["plain", "stopped", "again", "shorter"]))
    if kind == "stopped":
        row = row._replace(closed=True, stop="cancelled")
    elif kind == "again":
        row = row._replace(compared=draw(st.integers(0, created)))
    elif kind == "shorter":
        row = row._replace(closed=True, arrived=draw(st.integers(0, created)))
    for _ in range(2):
        row = feed(row, Look(), policy).row
    return row, policy


@given(st.data(), rested(), st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_map_for_which_there_is_something_to_do_is_marked(
    connection: Connection, data: st.DataObject, about: tuple[MapRow, MapPolicy], is_part: bool
) -> None:
    row, policy = about
    changed: Counter[str] = Counter()
    new = row
    for _ in range(data.draw(st.integers(1, 3))):
        there = [name for name in COUNTS if getattr(new, name)]
        if not there:
            break
        before = data.draw(st.sampled_from(there))
        # A cleared element waits first, until a step starts it. What clears a task in a group looks at the maps itself.
        ended = COUNTS[3:] if is_part else ("waiting", *COUNTS[3:])
        possible = {"waiting": COUNTS[3:], "unfinished": COUNTS[1:], "retrying": COUNTS[1:]}.get(before, ended)
        after = data.draw(st.sampled_from([*possible, None]))
        changed[before] -= 1
        new = new._replace(**{before: getattr(new, before) - 1})
        if after is not None:
            changed[after] += 1
            new = new._replace(**{after: getattr(new, after) + 1})
    stored = {name: getattr(row, name) for name in ("arrived", "created", "stop", *COUNTS)}
    connection.execute(delete(task_map))
    connection.execute(insert(task_map).values(task=1, run=1, task_id="m", opened=1, closed=int(row.closed), **stored))
    writes = MapWrites(deltas={(1, "m"): changed}, parts={(1, "m")} if is_part else set())

    write_maps(connection, [writes])

    # The map of a task in a mapped group only tells what its elements have become.
    after_look = feed(new, Look(), MapPolicy() if is_part else policy, starts=not is_part)
    works = after_look.told is not None or (not is_part and (after_look.row != new or after_look.stops))
    marked = connection.execute(select(task_map.c.pending)).scalar_one()
    assert marked or not works, (row, new, after_look)
