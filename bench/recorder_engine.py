"""What the flight recorder costs in an engine: from messages that leave the pipeline to frames for the link.

Run: `python -m bench.recorder_engine`. JSON lines out: CPU time per message, without what makes the messages, the
shortest of five rounds; without keys and with keys that are all different. Messages are those of windows of known
results, which leave the pipeline together; with `apart`, each leaves by itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.pipeline.reports.collector import FinishedMessages
from tidemill.pipeline.reports.report import WindowTimes, stand_for
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage

MESSAGES = 200_000
WINDOW = 100
PARTITIONS = 4
ROUNDS = 5
VALUE = b"x" * 97


class Owner:
    """What a task runs for; nobody asks it."""


def make_window(number: int, with_keys: bool) -> Iterator[tuple[SourceMessage, list[TaskInFlight]]]:
    """Yield the messages of a window, each with a task whose result was known."""
    at = time.time_ns() // 1000
    partition, first = number % PARTITIONS, number // PARTITIONS * WINDOW
    for offset in range(first, first + WINDOW):
        key = b"customer-%d-%d" % (partition, offset) if with_keys else None
        message = SourceMessage("orders", partition, offset, key, VALUE, (), at // 1000, None, None, at)
        task = ExecutorTask(f"{partition}-{offset}", source_offsets=(offset,), precomputed=PrecomputedResult(VALUE))
        run = TaskInFlight(task, Owner(), 0.0)  # type: ignore[arg-type]
        run.is_known = True
        yield message, [run]


async def run(with_keys: bool, apart: bool, records: bool) -> tuple[float, int, int]:
    """Let all messages leave; returns the seconds of CPU time, the rows in frames, and the bytes of these."""
    recorder = EngineRecorder(DebugSettings())
    finished = FinishedMessages([recorder])
    rows = size = 0

    def take_frames() -> None:
        nonlocal rows, size
        while (frame := recorder.frames.take_next()) is not None:
            rows, size = rows + frame.count, size + len(frame.body)
            recorder.frames.note_stored(frame.seq)

    began = time.process_time()
    for number in range(MESSAGES // WINDOW):
        messages, runs = zip(*make_window(number, with_keys), strict=True)
        at = time.time_ns() // 1000
        window = WindowTimes(number, at, at + 300)
        if records and apart:
            for message, tasks in zip(messages, runs, strict=True):
                finished.add(("orders", message.partition), message, len(VALUE), tasks, window)
        elif records:
            window.known_runs = stand_for(1, 1, True)
            finished.add_all(("orders", messages[-1].partition), messages, [len(VALUE)] * len(messages), runs, window)
        if records:
            recorder.note_committed(("orders", messages[-1].partition), messages[-1].offset + 1)
        if number % 20 == 0:
            recorder.look({}, ())
            await asyncio.sleep(0)
            take_frames()
    finished.flush()
    await recorder.close()
    take_frames()
    return time.process_time() - began, rows, size


def main() -> None:
    """Compare rounds with and without the recorder."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)  # as in an engine
    for with_keys, apart in ((False, False), (True, False), (False, True)):
        asyncio.run(run(with_keys, apart, records=True))
        spent: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for records in (False, True):
                seconds, rows, size = asyncio.run(run(with_keys, apart, records))
                spent[records].append(seconds)
        assert rows == MESSAGES, rows
        cost = (min(spent[True]) - min(spent[False])) / MESSAGES * 1e6
        line = {
            "keys": with_keys,
            "apart": apart,
            "cpu_us_per_message": round(cost, 3),
            "link_bytes": round(size / rows, 2),
        }
        print(json.dumps({"bench": "recorder engine", **line}), flush=True)


if __name__ == "__main__":
    main()
