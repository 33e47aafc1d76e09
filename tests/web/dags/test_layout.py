"""Where the tasks of a DAG are in its picture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.web.dags.layout import HEIGHT, MAX_TASKS, WIDTH, draw, list_in_order


@st.composite
def graphs(draw_value: st.DrawFn) -> dict[str, list[str]]:
    count = draw_value(st.integers(0, 12))
    pairs = st.lists(st.booleans(), min_size=count, max_size=count)
    return {f"t{n}": [f"t{m}" for m, has in enumerate(draw_value(pairs)[:n]) if has] for n in range(count)}


@given(graphs(), st.booleans())
def test_tasks_do_not_overlap_and_come_after_their_upstreams(upstream: dict[str, list[str]], down: bool) -> None:
    picture = draw(upstream, down=down)
    assert picture is not None
    places = {node.id: (node.x, node.y) for node in picture.nodes}
    assert places.keys() == upstream.keys()
    assert {(edge.before, edge.after) for edge in picture.edges} == {(b, t) for t, bs in upstream.items() for b in bs}
    for name, (x, y) in places.items():
        assert 0 <= x <= picture.width - WIDTH
        assert 0 <= y <= picture.height - HEIGHT
        for other, (left, top) in places.items():
            assert name == other or abs(x - left) >= WIDTH or abs(y - top) >= HEIGHT
        for before in upstream[name]:
            assert places[before][down] < places[name][down]


def test_an_edge_over_layers_passes_beside_the_tasks_between() -> None:
    picture = draw({"a": [], "b": ["a"], "c": ["a", "b"]}, down=False)
    assert picture is not None
    long = next(edge for edge in picture.edges if (edge.before, edge.after) == ("a", "c"))
    assert long.path.count("C") == 2


@pytest.mark.parametrize("down", [True, False])
def test_too_many_tasks_make_no_picture(down: bool) -> None:
    assert draw({str(number): [] for number in range(MAX_TASKS + 1)}, down=down) is None


@given(graphs(), st.booleans())
def test_rows_are_in_the_order_of_the_graph(upstream: dict[str, list[str]], is_drawn: bool) -> None:
    rows = list_in_order(upstream, draw(upstream, down=False) if is_drawn else None)
    assert sorted(rows) == sorted(upstream)
    assert all(rows.index(before) < rows.index(name) for name, befores in upstream.items() for before in befores)
