"""How long partitions stand still after SIGKILL of their engine at full load: `python -m bench.recovery [kills]`.

JSON lines out. Two engines run `cat` for each message of a topic that never runs dry; each result says which engine
made it. An engine is killed, and the time is taken until another process delivers the first result of its partitions.
Each engine of a pipeline is killed once, and then the next pipeline is started: after several kills in a row an engine
is started later and later.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import confluent_kafka as ck
from bench.harness import Bench, report

#: Messages that are fed at a time, and how many may wait.
_BLOCK, _AHEAD = 2_000, 6_000
ENGINES = 2
#: Before each kill.
PAUSE_SECONDS = 3.0


class Results:
    """Reads the topic `out`; tells which engine has delivered for a partition last, and when engines began.

    Attributes:
        count: How many results came.
        engines: The process that delivered the last result of each partition.
        began: When the first result of a partition came from a process.
    """

    def __init__(self, bootstrap: str) -> None:
        self._consumer = ck.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "recovery-probe",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 5,
            }
        )
        self._consumer.subscribe(["out"])
        self.count = 0
        self.engines: dict[int, int] = {}
        self.began: dict[tuple[int, int], float] = {}
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while not self._over.is_set():
            record = self._consumer.poll(0.1)
            if record is None or record.error() is not None:
                continue
            value, _, engine = (record.value() or b"").partition(b"|")
            place, pid = int(value.split()[1]), int(engine)
            self.count += 1
            self.engines[place] = pid
            self.began.setdefault((place, pid), time.monotonic())

    def close(self) -> None:
        """Stop reading."""
        self._over.set()
        self._reader.join()
        self._consumer.close()


def feed(bench: Bench, results: Results, over: threading.Event) -> None:
    """Keep the topic filled until it is over."""
    while not over.wait(0.1):
        if bench.produced - results.count < _AHEAD:
            bench.feed([b"fast %d %d" % (n % bench.partitions, bench.produced + n) for n in range(_BLOCK)])


def measure(folder: Path, kills: int) -> None:
    """Kill engines, one after the other."""
    bench = Bench(folder)
    bench.broker.create_topic("out", partitions=1)
    results = Results(bench.broker.bootstrap)
    over = threading.Event()
    feeder = threading.Thread(target=feed, args=(bench, results, over))
    found: list[float] = []
    try:
        feeder.start()
        while len(found) < kills:
            with bench.pipeline("Sleepy", "recovery", sinks={"kafka": {"out": {"topic": "out"}}}):
                bench.wait_settled("recovery", ENGINES)
                for _ in range(min(ENGINES, kills - len(found))):
                    time.sleep(PAUSE_SECONDS)
                    found.append(_kill_one(results))
                    report(bench="recovery", kill=len(found), seconds=found[-1])
    finally:
        over.set()
        if feeder.is_alive():
            feeder.join()
        results.close()
        bench.close()
    found.sort()
    report(
        bench="recovery",
        kills=kills,
        p50_seconds=found[len(found) // 2],
        p95_seconds=found[int(len(found) * 0.95) - 1],
        max_seconds=found[-1],
        bar_p95_seconds=1.0,
    )


def _kill_one(results: Results) -> float:
    """Kill the engine that has been there longest; return the seconds until another has a result of its partitions."""
    last = dict(results.engines)
    victim = min(
        set(last.values()), key=lambda pid: min(at for (_, engine), at in results.began.items() if engine == pid)
    )
    places = {place for place, engine in last.items() if engine == victim}
    known = set(results.began)
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while time.monotonic() < killed_at + 30:
        if new := [at for key, at in list(results.began.items()) if key[0] in places and key not in known]:
            return min(new) - killed_at
        time.sleep(0.01)
    raise TimeoutError("no engine took the partitions over")


if __name__ == "__main__":
    where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
    try:
        measure(where, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    finally:
        shutil.rmtree(where, ignore_errors=True)
