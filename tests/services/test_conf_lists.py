"""Long lists in the configuration of a run are sent value by value."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.structure import DagStructure, MapSource, MapStructure, ParamStructure, TaskStructure
from tidemill.runtime.json.codec import decode
from tidemill.services import conf_lists
from tidemill.services.conf_lists import send_lists

STRUCTURE = DagStructure(
    "d",
    (
        TaskStructure("a", mapped=MapStructure(("x",), (MapSource("param", key="rows"),))),
        TaskStructure("b", mapped=MapStructure(("x",), (MapSource("param", key="typed"),))),
        TaskStructure("c", mapped=MapStructure(("x",), (MapSource("param", key="unique"),))),
    ),
    params=(
        ParamStructure("rows"),
        ParamStructure(
            "typed",
            schema='{"type":["array","null"],"items":{"$ref":"#/$defs/one"},"maxItems":15000,'
            '"$defs":{"one":{"type":["string","integer"]}}}',
        ),
        ParamStructure("unique", schema='{"type":"array","uniqueItems":true}'),
    ),
)
LONG = ["x" * 100] * 2_500


class Store:
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.told: list[tuple[int, int]] = []

    def ask(self, call: Any) -> Any:
        self.asked.append(call)

    def send(self, conf: dict[str, Any]) -> Any:
        return send_lists(self.ask, STRUCTURE, conf, lambda done, total: self.told.append((done, total)))


def test_a_long_list_that_a_task_is_mapped_over_is_sent_in_parts() -> None:
    store = Store()
    sent = store.send({"n": 1, "rows": LONG})
    assert decode(sent.text) == {"n": 1, "rows": {"$tidemill": "items", "value": 2_500}}
    assert [(one.stage, one.key, one.first, len(one.values)) for one in store.asked] == [
        (sent.stage, "rows", first, min(1_000, 2_500 - first)) for first in (0, 1_000, 2_000)
    ]
    assert [decode(one) for call in store.asked for one in call.values] == LONG
    assert store.told == [(1_000, 2_500), (2_000, 2_500), (2_500, 2_500)]
    assert sent.stage > 0
    assert decode(store.send({"rows": LONG}).text) == {"rows": {"$tidemill": "items", "value": 2_500}}


@pytest.mark.parametrize("conf", [{}, {"rows": ["x"]}, {"other": LONG}, {"rows": "x" * 100_000}])
def test_other_values_stay_in_the_configuration(conf: dict[str, Any]) -> None:
    store = Store()
    sent = store.send(conf)
    assert (decode(sent.text), sent.stage, store.asked) == (conf, 0, [])


@pytest.mark.parametrize("values", [LONG, list(range(15_000))], ids=["long", "large only where schemas are checked"])
def test_the_values_of_a_list_with_a_schema_are_checked_one_by_one(values: list[Any]) -> None:
    store = Store()
    assert store.send({"typed": values}).stage > 0
    sent = len(store.asked)
    for wrong, place in (([*values[:-1], None], f"[{len(values) - 1}]"), (values * 7, f"{7 * len(values):,}")):
        with pytest.raises(ConfigError) as caught:
            store.send({"typed": wrong})
        assert place in str(caught.value)
    assert len(store.asked) == sent


def test_a_list_is_refused_whose_schema_needs_all_of_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Store().send({"unique": LONG})
    assert "uniqueItems" in str(caught.value)


def test_a_list_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(conf_lists, "MAX_LIST_BYTES", 100_000)
    with pytest.raises(ConfigError):
        store.send({"rows": LONG})
    assert store.asked == []
