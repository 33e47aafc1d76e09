"""The same work with other libraries: each message's value to a line of a file. Run by `bench.peers`, in an environment
with the peers and without tidemill: `python peer_programs.py NAME BROKERS TOPIC GROUP FILE`.

Each is set up for at-least-once: a line is in the file, as far as the system takes it, before its offset is committed.
"""

from __future__ import annotations

import asyncio
import sys
import time

COMMIT_SECONDS = 0.5
BATCH = 500


def bare(brokers: str, topic: str, group: str, path: str) -> None:
    """Run a loop over the client that all of them use."""
    import confluent_kafka as ck

    config = {"bootstrap.servers": brokers, "group.id": group, "enable.auto.commit": False}
    consumer = ck.Consumer({**config, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    committed_at = time.monotonic()
    with open(path, "ab") as file:
        while True:
            records = consumer.consume(BATCH, 0.1)
            file.write(b"".join(record.value() + b"\n" for record in records if record.error() is None))
            file.flush()
            if time.monotonic() - committed_at >= COMMIT_SECONDS:
                committed_at = time.monotonic()
                try:
                    consumer.commit(asynchronous=False)
                except ck.KafkaException as error:
                    if error.args[0].code() != ck.KafkaError._NO_OFFSET:
                        raise


def quix(brokers: str, topic: str, group: str, path: str) -> None:
    """Run Quix Streams with a batching sink, which is written before a checkpoint commits."""
    from quixstreams import Application
    from quixstreams.sinks.base import BatchingSink

    class Lines(BatchingSink):
        def write(self, batch):  # type: ignore[no-untyped-def]
            with open(path, "ab") as file:
                file.write(b"".join(item.value + b"\n" for item in batch))

    app = Application(
        brokers, consumer_group=group, auto_offset_reset="earliest", commit_interval=COMMIT_SECONDS, loglevel="WARNING"
    )
    frame = app.dataframe(app.topic(topic, value_deserializer="bytes"))
    frame.sink(Lines())
    app.run()


def faststream(brokers: str, topic: str, group: str, path: str, *, batch: bool) -> None:
    """Run FastStream, whose default commits before the work is done: here it commits after it."""
    from faststream import AckPolicy, FastStream
    from faststream.confluent import KafkaBroker

    broker = KafkaBroker(brokers, logger=None)
    file = open(path, "ab")  # noqa: SIM115 - open as long as the process
    options = {"group_id": group, "auto_offset_reset": "earliest", "ack_policy": AckPolicy.NACK_ON_ERROR}

    def write(data: bytes) -> None:
        file.write(data)
        file.flush()

    if batch:

        @broker.subscriber(topic, batch=True, max_records=BATCH, **options)
        async def take_all(values: list[bytes]) -> None:
            write(b"".join(value + b"\n" for value in values))
    else:

        @broker.subscriber(topic, **options)
        async def take(value: bytes) -> None:
            write(value + b"\n")

    asyncio.run(FastStream(broker, logger=None).run())


def faststream_batch(brokers: str, topic: str, group: str, path: str) -> None:
    """Take up to 500 at a time."""
    faststream(brokers, topic, group, path, batch=True)


def faststream_one(brokers: str, topic: str, group: str, path: str) -> None:
    """Take one at a time."""
    faststream(brokers, topic, group, path, batch=False)


PROGRAMS = {"bare": bare, "quix": quix, "faststream_batch": faststream_batch, "faststream_one": faststream_one}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
