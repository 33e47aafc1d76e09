"""NaN and infinities in every sink that sends JSON: refused by name, or written as the configuration says."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.server import PostgresServer

from tidemill import CollectResult, Handler
from tidemill.config.loading import load_settings
from tidemill.core.errors import ConfigError
from tidemill.deadletters.payloads import encode_payload, restore_fields
from tidemill.sinks.base import Sink, to_json
from tidemill.sinks.build import build_sink
from tidemill.sinks.non_finite import NonFinite, has_non_finite, spell_non_finite
from tidemill.sinks.payloads import FilePayload, HttpPayload, KafkaPayload, PostgresPayload, RedisPayload
from tidemill.testing import run_handler
from tidemill.testing.contract import deliver

NAN, INF = math.nan, math.inf
SINKS = {
    "kafka": {"topic": "results"},
    "filesystem": {"base_path": "out"},
    "http": {"url": "http://127.0.0.1:1/in"},
    "redis": {"url": "redis://127.0.0.1:1/0", "scripts": {"s": "return 1"}},
}


def build(kind: str, **delivery: Any) -> Sink:
    return build_sink(load_settings(overrides={"sinks": {kind: {"x": SINKS[kind]}}, "delivery": delivery}), kind, "x")


def payloads(kind: str, data: Any) -> list[Any]:
    match kind:
        case "kafka":
            return [KafkaPayload(key="k", data=data)]
        case "filesystem":
            return [FilePayload(path="p", data=data), FilePayload(path="p", data=data, op="replace")]
        case "http":
            return [HttpPayload(data=data)]
    return [
        RedisPayload(key="k", data=data),
        RedisPayload(key="k", data=[data], op="push"),
        RedisPayload(key="k", data={"field": data}, op="hset"),
        RedisPayload(key="k", data={"field": data}, op="stream"),
        RedisPayload(key="k", data=[data], op="script", script="s"),
    ]


@dataclasses.dataclass
class Reading:
    value: float
    at: Any = None


class Row(msgspec.Struct, rename="camel"):
    some_value: float


class Bad(enum.Enum):
    VALUE = NAN


def model(how: Any) -> Any:
    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(ser_json_inf_nan=how)
        x: float = NAN
        many: list[float] = [-INF, 1.5]

    return Model()


NOT_FINITE = {
    "NaN at ['a']": {"a": NAN},
    "Infinity at ['a'][1]['b']": {"a": [1, {"b": 1e400}]},
    "-Infinity at [2]": [None, 1.5, -INF],
    "NaN at ['r']['value']": {"r": Reading(NAN)},
    "NaN at [0]['someValue']": [Row(NAN)],
    "NaN at ['e']": {"e": Bad.VALUE},
    "NaN at [1]": (1, NAN),
    "NaN at [0]": {NAN},
}


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(("said", "data"), NOT_FINITE.items(), ids=NOT_FINITE)
def test_a_number_that_json_has_not_is_refused_with_its_place(kind: str, said: str, data: Any) -> None:
    sink = build(kind)
    for payload in payloads(kind, data):
        with pytest.raises(ValueError, match="which JSON cannot represent") as caught:
            sink.encode(payload)
        assert str(caught.value).startswith(f"{said},")
        assert "delivery.non_finite" in str(caught.value)


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(
    ("said", "written"),
    [("null", '{"a":[null,null],"s":"null","n":null}'), ("string", '{"a":["NaN","-Infinity"],"s":"null","n":null}')],
)
def test_one_setting_says_for_all_sinks_what_is_written_instead(kind: str, said: str, written: str) -> None:
    sink = build(kind, non_finite=said)
    for payload in payloads(kind, {"a": [NAN, -INF], "s": "null", "n": None}):
        assert written in str(msgspec.to_builtins(sink.encode(payload).body, builtin_types=(bytes,)))


@pytest.mark.parametrize("non_finite", ["refuse", "string"])
@pytest.mark.parametrize(
    ("how", "written"),
    [
        ("null", '{"x":null,"many":[null,1.5]}'),
        ("strings", '{"x":"NaN","many":["-Infinity",1.5]}'),
        ("constants", '{"x":NaN,"many":[-Infinity,1.5]}'),
    ],
)
def test_models_follow_their_own_setting(how: Any, written: str, non_finite: NonFinite) -> None:
    assert to_json(model(how), non_finite).decode() == written
    assert to_json([{"m": model(how)}, None], non_finite).decode() == f'[{{"m":{written}}},null]'


def test_text_and_bytes_that_say_null_are_data_like_others() -> None:
    for data in ("null", "NaN", b'{"a": NaN, "b": null}', {"null": "null"}, [None, {"a": None}, msgspec.Raw(b"null")]):
        to_json(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3) | st.dates(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=3) | st.just("null"), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_a_value_is_refused_if_and_only_if_its_json_would_differ(data: Any) -> None:
    differs = _has_constant(data)
    assert has_non_finite([data]) is differs
    if differs:
        with pytest.raises(ValueError, match="cannot represent"):
            to_json(data)
    assert not has_non_finite([spell_non_finite(data)])
    spelt = msgspec.json.decode(to_json(data, "string"))
    assert spelt == json.loads(json.dumps(spell_non_finite(data), default=str))


def _has_constant(data: Any) -> bool:
    try:
        json.dumps(data, default=str, allow_nan=False)
    except ValueError:
        return True
    return False


async def test_json_columns_refuse_what_other_columns_take(postgres: PostgresServer, database: str) -> None:
    def make(**delivery: Any) -> Sink:
        section = {"dsn": postgres.url(database), "pool_min": 1, "pool_max": 2}
        return build_sink(
            load_settings(overrides={"sinks": {"postgres": {"x": section}}, "delivery": delivery}), "postgres", "x"
        )

    def row(id: int, **data: Any) -> PostgresPayload:
        return PostgresPayload(table="t", data={"id": id, **data})

    sink: Any = make()
    await sink.connect()
    await sink.pool.execute("CREATE TABLE t (id int, x float8, many float8[], n numeric, j jsonb, k jsonb[])")
    fine = {"x": NAN, "many": [INF, 1.5], "n": -INF, "j": {"a": None, "m": model("strings")}}
    rows = [row(1, **fine), row(2, j={"a": [NAN]}), row(3, j=INF), row(4, k=[1, NAN]), row(5, j=1.5)]
    answers = list(await deliver(sink, rows))
    assert [answer is None for answer in answers] == [True, False, False, False, True]
    assert all("which JSON cannot represent" in answer.error for answer in answers if answer is not None)
    assert all("delivery.non_finite" in answer.error for answer in answers if answer is not None)
    for said in ("null", "string"):
        other: Any = make(non_finite=said)
        await other.connect()
        assert list(await deliver(other, [row(6, j={"a": [NAN]}), row(7, j=INF)])) == [None, None]
        await other.close()
    found = await sink.pool.fetch("SELECT j::text AS j FROM t ORDER BY id, j::text")
    texts = {'{"a": [null]}', '{"a": ["NaN"]}', "null", '"Infinity"', "1.5"}
    assert {each["j"] for each in found[1:]} == texts
    assert json.loads(found[0]["j"]) == {"a": None, "m": {"x": "NaN", "many": ["-Infinity", 1.5]}}
    (first,) = await sink.pool.fetch("SELECT x, many, n FROM t WHERE id = 1")
    assert math.isnan(first["x"])
    assert (first["many"], first["n"]) == ([INF, 1.5], -INF)
    await sink.close()


@pytest.mark.parametrize("text", ["null", "'null'", "string", "refuse"])
def test_the_setting_is_written_with_or_without_quotes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tidemill.yaml"
    path.write_text(f"delivery:\n  non_finite: {text}\n")
    assert load_settings(path).delivery.non_finite == text.strip("'")


def test_another_value_of_the_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tidemill.yaml").write_text("delivery:\n  non_finite: nan\n")
    with pytest.raises(ConfigError, match="non_finite"):
        load_settings(tmp_path / "tidemill.yaml")


class Rates(Handler[Any, Any]):
    async def transform(self, messages: Any) -> CollectResult:
        return CollectResult(files=[FilePayload(path="rates.jsonl", data={"rate": each}) for each in (1.5, NAN, 2.5)])


def test_a_message_whose_payload_is_refused_is_a_dead_letter_that_can_be_sent_when_the_setting_allows_it() -> None:
    run = run_handler(Rates(), ["x"])
    (letter,) = run.dead_letters
    assert "NaN at ['rate'], which JSON cannot represent" in letter.error
    assert [payload.data for payload in run.payloads["filesystem.files"]] == [{"rate": 1.5}, {"rate": 2.5}]
    (text,) = letter.original_payloads
    again = FilePayload(**restore_fields(text, typed=False))
    assert build("filesystem", non_finite="string").encode(again).body == b'{"rate":"NaN"}'
    with pytest.raises(ValueError, match="NaN at"):
        build("filesystem").encode(again)


@pytest.mark.parametrize("data", [NAN, {"a": [INF, {"b/c": -INF}]}, (NAN, None), {"r": Reading(NAN)}, [Row(INF)]])
@pytest.mark.parametrize("typed", [True, False])
def test_a_letter_keeps_what_json_has_not(data: Any, typed: bool) -> None:
    fields = restore_fields(encode_payload(KafkaPayload(data=data)), typed=typed)
    assert has_non_finite([fields["data"]])
    assert to_json(fields["data"], "string") == to_json(data, "string")


@pytest.mark.parametrize("how", ["null", "strings", "constants"])
def test_a_letter_keeps_what_a_model_writes_and_the_numbers_of_its_fields(how: Any) -> None:
    for data in (model(how), {"m": [model(how)]}):
        text = encode_payload(KafkaPayload(data=data))
        json.loads(text, parse_constant=pytest.fail)
        assert to_json(restore_fields(text, typed=False)["data"]) == to_json(data)
        found = restore_fields(text, typed=True)["data"]
        row = found["m"][0] if "m" in found else found
        assert math.isnan(row["x"])
        assert row["many"] == [-INF, 1.5]
