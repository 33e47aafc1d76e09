"""A triggerer that is cut off from its store while its triggers read a Kafka topic."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.services.triggerer.test_task_host import Triggerers
from tests.until import until

from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.testing.kafka import committed_offsets, produce, unique_name, wait_for_committed

LEASE = ServiceLease(3.0)


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_past_its_lease_it_acknowledges_nothing_until_the_store_has_answered(
    embedded_kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.5)
    topic = unique_name("t")
    embedded_kafka.create_topic(topic, partitions=1)

    def write(number: int) -> None:
        produce(embedded_kafka.bootstrap, topic, [b'{"n": %d}' % number], partition=0)

    def committed() -> int:
        return committed_offsets(embedded_kafka.bootstrap, topic, topic)[0]

    async def wait_committed(total: int) -> None:
        await asyncio.to_thread(wait_for_committed, embedded_kafka.bootstrap, topic, topic, total, timeout_seconds=30)

    triggerers = Triggerers(tmp_path)
    store = triggerers.store
    one = store.defer(
        "tidemill.triggers.builtin.kafka.KafkaTrigger",
        topic=topic,
        brokers=embedded_kafka.bootstrap,
        group=topic,
        where={"n": {"ge": 100}},
        value_format="json",
    )
    host = triggerers.start(lease=LEASE)
    try:
        write(1)
        await wait_committed(1)

        store.fail = lambda request: "before"
        await asyncio.sleep(LEASE.seconds)
        write(2)  # not for the trigger: there is nothing to store
        await asyncio.sleep(1.5)
        assert committed() == 1
        store.fail = lambda request: None
        await wait_committed(2)

        store.fail = lambda request: "before"
        await asyncio.sleep(LEASE.seconds)
        write(3)
        write(100)
        await asyncio.sleep(1.5)
        store.lose(max(store.live))
        assert committed() == 2
        assert one.payload is None
        store.fail = lambda request: None
        await until(lambda: one.resumed, 60)
        await wait_committed(3)
        assert one.claims == 2, "another session runs it; the event of the first one was refused"
    finally:
        await triggerers.stop(host)
