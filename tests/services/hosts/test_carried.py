"""A stream over a Kafka topic whose handler fails, and whose worker and triggerer are killed.

The broker deletes each record as soon as its offset is committed. Each record is handled at least once, and each
emitted element is there once: what a try leaves, the next one gets from the store.

CARRIED_SEED=7 pytest -s --nightly tests/services/hosts/test_carried.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from sqlalchemy import text
from tests.services.hosts.fleet import count, run_fleet, wait_for
from tests.size import sized
from tests.store.server import PostgresServer
from tests.until import until

from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.json.codec import decode
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.engines.opening import open_store
from tidemill.testing.kafka import produce, unique_name, wait_for_committed

#: The parts in which records are written, and the records of each; in each part the handler fails, and a process dies.
PARTS, RECORDS = sized((2, 10), (40, 50))
SEED = int(os.environ.get("CARRIED_SEED", "0")) or random.randrange(1_000_000)
SERVICES = ("scheduler-1", "worker-1", "triggerer-1")
FILE = """
import time
from datetime import timedelta
from pathlib import Path
from tidemill.dags import DAG, BaseOperator, StreamAction, task
from tidemill.triggers import KafkaTrigger

FOLDER = Path(__file__).parent.parent
AGAIN = dict(retries=999, retry_delay=timedelta(seconds=0.05))

class Read(BaseOperator):
    stream_max_events = 4
    stream_linger = 0.5
    def execute(self, context):
        self.defer(trigger=KafkaTrigger(**TOPIC, value_format="json"))
    def handle_trigger_events(self, events, context):
        for event in events:
            number = event.payload["value"]
            with (FOLDER / "seen").open("a") as seen:
                print(context["ti"].try_number, event.trigger_run_id, event.sequence_index, number, file=seen)
            if number < 0:
                return StreamAction.STOP
            context["stream"].emit(number, identity=event.identity)
            met = FOLDER / f"met{number}"
            if number % PER_PART == FAULT and not met.exists():
                met.touch()
                while not (FOLDER / f"fail{number}").exists():
                    time.sleep(0.02)
                raise RuntimeError("the handler fails in the middle")

with DAG("carried", max_active_tasks=50):
    @task(**AGAIN)
    def double(number):
        return 2 * number
    @task(**AGAIN)
    def collect(numbers):
        return list(numbers)
    read = Read(task_id="read", **AGAIN)
    collect(double.expand(number=read.output))
"""
#: The record of each part at which the handler fails: not the first one of a batch.
FAULT = 5


def read_seen(folder: Path) -> list[tuple[int, ...]]:
    """Return the try, the trigger run, the index and the number of each event that was handled."""
    return [tuple(map(int, line.split())) for line in (folder / "seen").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(240 + 30 * PARTS)
async def test_what_a_failed_try_leaves_is_handled_although_the_broker_has_forgotten_it(
    postgres: PostgresServer, embedded_kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    topic = embedded_kafka.create_topic(unique_name("carried"))
    broker = embedded_kafka.bootstrap
    admin = AdminClient({"bootstrap.servers": broker})
    url = await postgres.new_database()
    store = await open_store(url)

    async def rows(statement: str) -> list[tuple[Any, ...]]:
        return await store.read(lambda connection: [tuple(row) for row in connection.execute(text(statement)).all()])

    with run_fleet(tmp_path, url) as fleet:
        text_ = FILE.replace("TOPIC", repr({"topic": topic, "brokers": broker, "group": topic}))
        fleet.write(text_.replace("PER_PART", str(RECORDS)).replace("FAULT", str(FAULT)))
        for name in SERVICES:
            fleet.start(name)
        await wait_for(store, "SELECT count(*) FROM dag", 1, fleet.describe)
        await store.call(CreateRun("carried", run_id="r", by="tester"))
        victims = [SERVICES[1 + number % 2] for number in range(PARTS)]
        chance.shuffle(victims)
        faults = []

        async def kill(victim: str) -> None:
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            fleet.kill(victim)
            faults.append(victim)
            fleet.start(victim)

        for part, victim in enumerate(victims):
            phase = chance.randrange(3)
            await asyncio.to_thread(produce, broker, topic, [str(part * RECORDS + n) for n in range(RECORDS)])
            if phase == 0:
                await kill(victim)
            number = part * RECORDS + FAULT
            await until((tmp_path / f"met{number}").exists, what=fleet.describe)
            total = (part + 1) * RECORDS
            await asyncio.to_thread(wait_for_committed, broker, topic, topic, total, timeout_seconds=60)
            place = TopicPartition(topic, 0, total)
            deleted = await asyncio.to_thread(lambda place=place: admin.delete_records([place])[place].result(60))
            assert deleted.low_watermark == total, "the broker has forgotten all records"
            if phase == 1:
                await kill(victim)
            (tmp_path / f"fail{number}").touch()
            if phase == 2:
                await kill(victim)
        # A message that is delivered again may come after later ones, and the last one ends the stream.
        everything = set(range(PARTS * RECORDS))
        await until(lambda: everything <= {number for *_, number in read_seen(tmp_path)}, what=fleet.describe)
        await asyncio.to_thread(produce, broker, topic, ["-1"])
        over = "SELECT count(*) FROM dag_run WHERE state IN ('success', 'failed')"
        await wait_for(store, over, 1, fleet.describe)

        numbers = sorted(everything)
        assert await count(store, "SELECT count(*) FROM dag_run WHERE state = 'success'") == 1, fleet.describe()
        values = "SELECT x.value FROM {} x JOIN task_instance t ON t.id = x.task WHERE t.task_id = '{}' {}"
        emitted = await rows(values.format("map_item", "read", "ORDER BY x.number"))
        assert sorted(decode(value) for (value,) in emitted) == numbers
        ((collected,),) = await rows(values.format("xcom", "collect", "AND x.key = 'return_value'"))
        assert decode(collected) == [2 * decode(value) for (value,) in emitted]
    seen = read_seen(tmp_path)
    assert {number for *_, number in seen} == {*numbers, -1}
    tries: dict[int, set[int]] = {}
    for number_of_try, trigger, *_ in seen:
        tries.setdefault(trigger, set()).add(number_of_try)
    carried = Counter(trigger for number_of_try, trigger, *_ in seen if number_of_try > min(tries[trigger]))
    assert carried, "no event was delivered in a later try under its old trigger_run_id"
    print(
        f"CARRIED_SEED={SEED}, load {os.getloadavg()[0]:.1f}: {len(numbers)} records, killed {dict(Counter(faults))}, "
        f"{len({one for one, *_ in seen})} tries, {sum(carried.values())} events carried, "
        f"{len(seen) - len(numbers) - 1} handled again"
    )
    await store.close()
