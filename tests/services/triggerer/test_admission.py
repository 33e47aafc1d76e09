"""Lists of triggers beside each other: what they may not share, and what becomes of it when one of them goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.services.triggerer.replicas import Part, Stage
from tests.until import until

from tidemill.core.errors import ConfigError
from tidemill.services.triggerer.lists.admission import digest_list, find_upstream_claims
from tidemill.store.queries.triggers.triggers import find_triggers
from tidemill.store.records import TriggerSpec, TriggerState

pytestmark = pytest.mark.usefixtures("fresh")


def waits(name: str = "waits") -> TriggerSpec:
    return spec(name, hosted.Counting, then="wait")


def claiming(name: str, upstream: str | None, **kwargs: object) -> TriggerSpec:
    return TriggerSpec(
        name,
        "tests.services.triggerer.claiming.Claiming",
        json.dumps({"upstream": upstream, **kwargs}, sort_keys=True),
        "never",
    )


@pytest.fixture
async def stage(postgres, fresh) -> AsyncIterator[Stage]:
    made = Stage(await postgres.new_database())
    yield made
    await made.close()


async def refused(part: Part) -> str:
    assert part.running is not None
    with pytest.raises(ConfigError) as caught:
        await asyncio.wait_for(asyncio.shield(part.running), 30)
    return str(caught.value)


async def running(part: Part, count: int) -> None:
    await until(lambda: part.replica.host is not None and part.replica.host.running == count)


async def test_a_name_of_a_live_list_is_refused_naming_its_owner(stage):
    first = await stage.started(waits(), list_name="one")
    await running(first, 1)
    second = await stage.started(waits(), waits("more"), list_name="two")
    said = await refused(second)
    assert "the list two cannot run beside the list one, which process" in said
    assert "both have the trigger 'waits'" in said
    assert DID["waits"].count("run") == 1
    assert DID["more"] == []
    [record] = await first.store.read(lambda c: find_triggers(c, ["waits"]))
    assert (record.list, record.state) == ("one", TriggerState.RUNNING)
    await second.end()
    await first.end()
    third = await stage.started(waits(), list_name="two")
    await running(third, 1)


async def test_an_upstream_that_a_live_list_reads_is_refused(stage):
    first = await stage.started(claiming("a", "kafka orders/mine"), claiming("b", None), list_name="one")
    await running(first, 2)
    second = await stage.started(claiming("c", "kafka orders/mine"), list_name="two")
    assert "both have the stream 'kafka orders/mine'" in await refused(second)
    third = await stage.started(claiming("c", "kafka orders/another"), list_name="three")
    await running(third, 1)


async def test_what_a_dead_list_owned_may_be_taken_once_its_death_is_certain(stage):
    first = await stage.started(waits(), claiming("a", "kafka orders/mine"), list_name="one")
    await running(first, 2)
    await first.vanish()
    second = await stage.started(waits(), claiming("b", "kafka orders/mine"), list_name="two")
    await running(second, 2)
    [record] = await second.store.read(lambda c: find_triggers(c, ["waits"]))
    assert record.list == "two"
    assert [one.list for one in await stage.sessions()] == ["two"]


async def test_a_list_that_stopped_blocks_no_other(stage):
    first = await stage.started(waits(), list_name="one")
    await running(first, 1)
    await first.end()
    second = await stage.started(waits(), list_name="two")
    await running(second, 1)


async def test_a_reload_that_would_collide_changes_nothing(stage):
    first = await stage.started(waits("ours"), list_name="one")
    second = await stage.started(waits("theirs"), waits("gone"), list_name="two")
    await running(first, 1)
    await running(second, 2)
    await until(lambda: "yielded" in DID["theirs"] and "yielded" in DID["gone"])
    assert second.replica.host is not None
    with pytest.raises(ConfigError, match="both have the trigger 'ours'"):
        await second.replica.host.reload([waits("theirs"), waits("ours"), waits("new")])
    assert DID["gone"] == ["run", "yielded"]
    assert DID["new"] == []
    assert second.replica.host.running == 2
    assert await second.store.read(lambda c: find_triggers(c, ["new"])) == []


async def test_a_name_that_a_live_list_has_given_up_is_free(stage):
    first = await stage.started(waits(), waits("stays"), spec("done", hosted.Counting), list_name="one")
    await running(first, 2)
    first.listed = [waits("stays")]
    first.replica.read_again()
    await until(lambda: first.replica._reading is None)
    second = await stage.started(waits(), spec("done", hosted.Counting, then="wait"), list_name="two")
    await running(second, 2)
    await until(lambda: DID["waits"].count("yielded") == 2)


async def test_an_upstream_that_a_live_list_has_given_up_is_free(stage):
    first = await stage.started(
        claiming("a", "orders"), claiming("b", "bills"), claiming("c", "bills"), list_name="one"
    )
    await running(first, 3)
    first.listed = [claiming("a", "others"), claiming("b", "bills")]
    first.replica.read_again()
    await until(lambda: first.replica._reading is None)
    second = await stage.started(claiming("d", "orders"), list_name="two")
    await running(second, 1)
    for upstream in ("others", "bills"):
        third = await stage.started(claiming("e", upstream), list_name="three")
        assert f"both have the stream '{upstream}'" in await refused(third)
        await third.end()


async def test_of_two_lists_that_start_at_once_with_one_name_one_is_refused(stage):
    parts = [await stage.started(waits(), list_name=f"list-{n}") for n in range(3)]
    await until(lambda: sum(part.running is not None and part.running.done() for part in parts) == 2)
    [winner] = [part for part in parts if part.running is not None and not part.running.done()]
    await running(winner, 1)
    for part in parts:
        if part is not winner:
            assert winner.ownership.list_name in await refused(part)
    assert DID["waits"].count("run") == 1


async def test_only_producers_that_name_their_upstream_claim_it():
    specs = [
        claiming("a", "two"),
        claiming("b", "one"),
        claiming("c", "one"),
        claiming("d", None),
        claiming("e", "three", fails=True),
        claiming("i", "nul\0 and \ud800"),
        claiming("j", "long" * 5_000),
        claiming("k", "long" * 5_000 + "er"),
        waits(),
        TriggerSpec("f", "tests.triggers.nowhere.Class"),
        TriggerSpec("g", "tests.services.triggerer.claiming.Nothing"),
        TriggerSpec("h", "tests.services.triggerer.claiming.Claiming", '{"unknown": 1}'),
    ]
    long, longer, *others = sorted(await find_upstream_claims(specs))
    assert others == ["nul\ufffd and ?", "one", "two"]
    assert long != longer
    assert len(long) == len(longer) < 400


def test_the_digest_of_a_list_is_that_of_its_content_and_not_of_its_order():
    one, two = waits("one"), waits("two")
    assert digest_list([one, two]) == digest_list([two, one])
    assert len({digest_list(specs) for specs in ([], [one], [one, two])}) == 3
