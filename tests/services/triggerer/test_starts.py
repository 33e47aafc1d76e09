"""Triggers that start their tasks, and events that end tasks, as a triggerer runs them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.dags.attempts import Claim
from tests.services.triggerer import hosted
from tests.services.triggerer.ending_trigger import CLASSPATH
from tests.services.triggerer.hosted import DID, UPSTREAMS, Upstream
from tests.services.triggerer.test_task_host import Triggerers
from tests.until import until

from tidemill.services.triggerer.hosting import host as host_module
from tidemill.store.calls.trigger_calls import EventEnding, PlaceTriggers, StartClaim
from tidemill.store.calls.worker_calls import ClaimedAttempt

#: It runs for minutes.
SLOW = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def triggerers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> AsyncIterator[Triggerers]:
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.5)
    DID.clear()
    UPSTREAMS.clear()
    made = Triggerers(tmp_path)
    yield made
    for host in list(made.running):
        await made.stop(host)


def templates(**changes: Any) -> StartClaim:
    given = {**dataclasses.asdict(Claim("dag", "task", **changes)), "run": 1, "operator": ""}
    attempt = ClaimedAttempt(**given)
    return StartClaim(True, attempt, (("x", '{"n":5}'),), started_us=1)


@pytest.mark.parametrize(
    ("state", "ending"),
    [
        ("success", EventEnding("success", xcoms=(("return_value", "7"),))),
        ("failed", EventEnding("failed", "7")),
        ("skipped", EventEnding("skipped")),
    ],
)
async def test_an_event_says_how_it_ends_the_task(triggerers: Triggerers, state: str, ending: EventEnding) -> None:
    one = triggerers.store.defer(CLASSPATH, state=state, value=7)
    triggerers.start()
    await until(lambda: one.resumed)
    assert one.payload == state
    assert one.ending is not None
    assert msgspec.json.decode(one.ending, type=EventEnding) == ending


async def test_xcoms_that_cannot_be_stored_fail_the_trigger(triggerers: Triggerers) -> None:
    bad = triggerers.store.defer(CLASSPATH, state="unstorable")
    worse = triggerers.store.defer(CLASSPATH, state="success", xcoms=["a"])
    triggerers.start()
    await until(lambda: bad.error and worse.error)
    assert "xcoms of a TaskSuccessEvent cannot be stored: XCom 'key'" in str(bad.error)
    assert "must be a dict" in str(worse.error)


async def test_templates_are_rendered_before_the_trigger_is_created(triggerers: Triggerers) -> None:
    kwargs = {"value": "{{ ds }} {{ element.x.n }} {{ ti.map_index }} {{ start_date.year }}"}
    one = triggerers.store.start(CLASSPATH, kwargs, templates(map_index=3))
    data = triggerers.store.start(CLASSPATH, {"value": "{{ ds }}"}, StartClaim())
    triggerers.start()
    await until(lambda: one.resumed and data.resumed)
    assert (one.payload, data.payload) == ("2026-01-01 5 3 1970", "{{ ds }}")


async def test_a_template_that_takes_too_long_fails_its_task_alone_and_blocks_nothing(
    triggerers: Triggerers,
) -> None:
    slow = [triggerers.store.start(CLASSPATH, {"value": SLOW}, templates()) for _ in range(20)]
    good = triggerers.store.start(CLASSPATH, {"value": "{{ ds }}"}, templates())
    plain = triggerers.store.defer(CLASSPATH, value=1)
    began = time.monotonic()
    triggerers.start()
    await until(lambda: plain.resumed)
    await until(lambda: good.resumed and all(one.error for one in slow))
    assert time.monotonic() - began < 15, "equal ones are refused at once"
    assert "took longer than 1 s" in str(slow[0].error)
    await until(lambda: sum(one.name == "templates of triggers" for one in threading.enumerate()) <= 1)


@pytest.mark.parametrize(
    ("kwargs", "start", "said"),
    [
        ({"value": "{{ params.no }}"}, templates(), "has no attribute 'no'"),
        ({"value": "{{ 1 // 0 }}"}, templates(), "ZeroDivisionError"),
        ({"value": "{{ ds }}"}, StartClaim(True), "cannot read the structure"),
        (["no dict"], StartClaim(), "needs a dict of arguments"),
        ({"valeu": 1}, StartClaim(), "has no argument 'valeu'"),
    ],
)
async def test_arguments_that_cannot_be_made_fail_the_task(
    triggerers: Triggerers, kwargs: Any, start: StartClaim, said: str
) -> None:
    one = triggerers.store.start(CLASSPATH, kwargs, start)
    good = triggerers.store.start(CLASSPATH, {"value": 1}, StartClaim())
    triggerers.start()
    await until(lambda: one.error and good.resumed)
    assert said in str(one.error)


async def test_a_trigger_whose_stream_another_triggerer_reads_is_handed_over(triggerers: Triggerers) -> None:
    classpath = f"{hosted.__name__}.Sharing"
    mine, other = (triggerers.store.start(classpath, {"upstream": name}, StartClaim()) for name in ("a", "b"))
    triggerers.store.elsewhere.add(other.claim.id)
    UPSTREAMS.update({name: Upstream(name) for name in "ab"})
    triggerers.start()
    await until(lambda: DID["a"] == ["open"])
    placed = [one for one in triggerers.store.requests if isinstance(one, PlaceTriggers)]
    assert [(number, key) for number, _, key in placed[0].triggers] == [(mine.claim.id, "'a'"), (other.claim.id, "'b'")]
    await asyncio.sleep(0)
    assert DID["b"] == []
    assert (other.error, mine.error) == (None, None)
