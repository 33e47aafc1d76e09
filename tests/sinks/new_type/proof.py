"""Uses the type that `test_new_type.py` added, in every way in which a type is used."""

from __future__ import annotations

import asyncio
import datetime
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tidemill
from tidemill import CollectResult, ConfigError, ExecutorTask, Handler, LinesPayload, PrecomputedResult
from tidemill.cli.doctor.checks import check_sink
from tidemill.config.loading import load_settings
from tidemill.config.schema import build_schema
from tidemill.deadletters.payloads import encode_payload
from tidemill.deadletters.redrive.sinks import restore_payload
from tidemill.sinks.build import build_sink
from tidemill.testing import run_handler
from tidemill.testing.contract import deliver_through_outbox

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


class Titled(Handler):
    async def arrange(self, messages, pending):
        return [ExecutorTask(task_id=f"t{m.offset}", precomputed=PrecomputedResult(m.value)) for m in messages]

    async def on_task_complete(self, result):
        return CollectResult(lines=[LinesPayload(title="a", data={"text": result.stdout})])


def prove_settings() -> None:
    settings = load_settings(None, {"TIDEMILL_SINKS__LINES__OTHER__PATH": "other"}, {"sinks": SINKS})
    assert settings.sinks.lines["other"].path == "other"
    assert list(settings.sinks.group_by_type()) == ["lines"]
    assert build_schema()["$defs"]["LinesSinkSettings"]["required"] == ["path"]
    for sinks, problem in (
        ({"lines": {"out": {"pth": "x"}}}, "sinks.lines.out.pth: unknown key; did you mean path"),
        ({"custom": {"lines": {"out": {}}}}, "move it to sinks.lines"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_settings(None, {}, {"sinks": sinks})


def prove_delivery() -> None:
    settings = load_settings(None, {}, {"sinks": SINKS})
    sink = build_sink(settings, "lines", "out")
    assert sink.section == "sinks.lines.out"
    payloads = [LinesPayload(title="a", data={"n": 1}), LinesPayload(title="b", data={"at": NOON})]
    assert asyncio.run(deliver_through_outbox(sink, payloads)) == []
    assert Path("out").read_text() == 'a {"n":1}\nb {"at":"2026-01-01T12:00:00Z"}\n'
    assert check_sink(settings, "lines", "out") == "connected"


def prove_handler() -> None:
    done = run_handler(Titled, ["one"], {"sinks": SINKS})
    assert done.payloads == {"lines.out": [LinesPayload(title="a", data={"text": "one"})]}
    assert not CollectResult(lines=[]).has_outputs


def prove_redrive() -> None:
    payload = LinesPayload(title="b", data={"at": NOON})
    letter = SimpleNamespace(sink_type="lines", sink_name="out")
    assert restore_payload(letter, encode_payload(payload)) == payload


SINKS = {"lines": {"out": {"path": "out"}}}

if __name__ == "__main__":
    assert "LinesPayload" in tidemill.__all__
    prove_settings()
    prove_delivery()
    prove_handler()
    prove_redrive()
    assert not {f"tidemill.sinks.{name}" for name in ("kafka", "postgres", "mongo", "http", "redis")} & set(sys.modules)
