"""What a payload costs from a hook's result to a confirmed line: Outbox and file sink, on one loop.

Prints JSON lines. Every run checks the file that it wrote.

    python bench/outbox.py [--payloads 200000] [--rate 20000] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path

from tidemill.config.sections.sink_settings import FilesystemSinkSettings
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.testing.scripted import ScriptedDeadLetters


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def deliver(base: Path, payloads: int, rate: float | None) -> dict[str, float]:
    """Submit one payload per message, in slices of 10 ms at `rate`, or of 500 payloads as fast as possible."""
    outbox = Outbox(
        {"filesystem": {"out": FilesystemSink("out", FilesystemSinkSettings(base_path=str(base)))}},
        ScriptedDeadLetters(),
    )
    await outbox.connect()
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    slice_size = 500 if rate is None else max(1, int(rate / 100))
    started, cpu = time.perf_counter(), cpu_seconds()
    for first in range(0, payloads, slice_size):
        now = loop.time()
        for number in range(first, min(first + slice_size, payloads)):
            message = SourceMessage("in", number % 4, number)
            data = {"offset": number, "status": 200, "path": "/index.html", "bytes": 1234}
            routed = outbox.route(CollectResult(files=(FilePayload(path="out.jsonl", data=data),)))
            outbox.submit(routed, Origin((message,)), lambda now=now: latencies.append(loop.time() - now))
        if rate is None:
            while len(latencies) < first - 20_000:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(max(0.0, started + (first + slice_size) / rate - time.perf_counter()))
    await outbox.flush(60.0)
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    await outbox.close()
    offsets = [json.loads(line)["offset"] for line in (base / "out.jsonl").open()]
    assert offsets == list(range(payloads)), "the file is not what was submitted"
    latencies.sort()
    return {
        "payloads": payloads,
        "payloads_per_second": round(payloads / wall),
        "cpu_us_per_payload": round(cpu / payloads * 1e6, 2),
        "batches": outbox.statistics().sinks["sinks.filesystem.out"].delivered_count,
        "latency_p50_ms": round(latencies[len(latencies) // 2] * 1000, 2),
        "latency_p99_ms": round(latencies[len(latencies) * 99 // 100] * 1000, 2),
    }


async def idle_latency(base: Path, payloads: int) -> dict[str, float]:
    """Submit one payload at a time and wait for it."""
    outbox = Outbox(
        {"filesystem": {"out": FilesystemSink("out", FilesystemSinkSettings(base_path=str(base)))}},
        ScriptedDeadLetters(),
    )
    await outbox.connect()
    loop = asyncio.get_running_loop()
    latencies = []
    for number in range(payloads):
        done = loop.create_future()
        started = time.perf_counter()
        routed = outbox.route(CollectResult(files=(FilePayload(path="out.jsonl", data={"n": number}),)))
        outbox.submit(routed, Origin((SourceMessage("in", 0, number),)), lambda done=done: done.set_result(None))
        await done
        latencies.append(time.perf_counter() - started)
    await outbox.close()
    latencies.sort()
    return {
        "payloads": payloads,
        "latency_p50_ms": round(latencies[len(latencies) // 2] * 1000, 3),
        "latency_p99_ms": round(latencies[len(latencies) * 99 // 100] * 1000, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=20_000)
    parser.add_argument("--profile", action="store_true", help="print where the time of a full-speed run goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(asyncio.run, deliver(base / "p", arguments.payloads, None))
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
            return
        for name, run in (
            ("outbox_full_speed", deliver(base / "a", arguments.payloads, None)),
            ("outbox_at_rate", deliver(base / "b", arguments.payloads, arguments.rate)),
            ("outbox_idle", idle_latency(base / "c", 2_000)),
        ):
            print(json.dumps({"bench": name, **asyncio.run(run)}), flush=True)


if __name__ == "__main__":
    main()
