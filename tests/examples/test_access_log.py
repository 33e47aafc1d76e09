"""The example pipeline without Kafka and Spark: its hooks, its awk program, and the check of its results."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml

from tidemill.cli.demo import check as demo_check
from tidemill.cli.demo.demo import find_example
from tidemill.config.settings import Settings
from tidemill.deadletters.letter import Letter, LetterKind, LetterSource
from tidemill.pipeline.handler.models import ExecutorResult, ExecutorTask, MessageGroup, PendingContext
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import to_json

PARTITIONS = 4


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(find_example()))
    import pipeline  # type: ignore[import-not-found]

    yield pipeline
    sys.path.remove(str(find_example()))


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return demo_check.read_lines(find_example() / "access.log.gz")


def message(line: bytes, offset: int = 0, partition: int = 0) -> SourceMessage:
    return SourceMessage("access-log", partition, offset, value=line)


def run(task: ExecutorTask) -> ExecutorResult:
    done = subprocess.run(["awk", *task.args], input=task.stdin, capture_output=True, check=True)
    return ExecutorResult(0, done.stdout, "", 0.25, task, 1)


def test_the_input_is_the_one_that_its_source_note_describes(lines: list[bytes]) -> None:
    expected = demo_check.count_directly(lines, PARTITIONS)
    totals = demo_check.add_up_input(expected)
    assert len(lines) == 10_000
    assert totals.lines == {200: 9125, 304: 445, 404: 213, 301: 164, 206: 45, 500: 3, 416: 2, 403: 2}
    assert totals.bytes.total() == 2_747_282_505
    (bad,) = [position for position, line in expected.items() if line is None]
    assert b"20/May/2015:12:05:17" in lines[bad[1] * PARTITIONS + bad[0]]


def test_a_line_becomes_a_model(example: ModuleType) -> None:
    line = b'1.2.3.4 - kim [17/May/2015:10:05:03 +0200] "GET /a\\"b HTTP/1.1" 404 - "-" "curl"'
    payload = example.AccessLog().deserialize_message(message(line))
    assert (payload.client, payload.user, payload.status, payload.size) == ("1.2.3.4", "kim", 404, 0)
    assert payload.request == 'GET /a\\"b HTTP/1.1'
    assert payload.time.isoformat() == "2015-05-17T10:05:03+02:00"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b'1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1 "-" "cut off',
        b'1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 999 1 "-" "no such status"',
        b'1.2.3.4 - - [99/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1 "-" "no such day"',
        b'1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /\xff HTTP/1.1" 200 1 "-" "not UTF-8"',
    ],
)
def test_a_line_that_is_not_in_the_format_cannot_be_parsed(example: ModuleType, line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        example.AccessLog().deserialize_message(message(line))


async def test_a_window_becomes_one_task_per_status_that_names_its_lines(
    example: ModuleType, lines: list[bytes]
) -> None:
    handler, window = example.AccessLog(), parsed(example, lines[:400], partition=2)
    tasks = await handler.arrange(window, PendingContext())
    assert {task.labels["status"] for task in tasks} == {str(m.payload.status) for m in window}
    assert sorted(o for task in tasks for o in task.source_offsets) == [m.offset for m in window]
    again = await handler.arrange(window, PendingContext())
    assert [task.task_id for task in tasks] == [task.task_id for task in again]


def parsed(example: ModuleType, lines: list[bytes], partition: int = 0) -> list[SourceMessage]:
    """Make the messages of a partition as an engine hands them over: those that parse, with their payload."""
    handler, messages = example.AccessLog(), []
    for offset, line in enumerate(lines):
        each = message(line, offset, partition)
        try:
            each.payload = handler.deserialize_message(each)
        except ValueError:
            continue
        messages.append(each)
    return messages


async def outputs_of(example: ModuleType, lines: list[bytes], window: int) -> demo_check.Outputs:
    """Run the hooks and real awk processes over all lines, as the engine would without any failure."""
    handler = example.AccessLog()
    reports: list[Any] = []
    outcomes: list[Any] = []
    windows: list[Any] = []
    for partition in range(PARTITIONS):
        messages = parsed(example, lines[partition::PARTITIONS], partition)
        for start in range(0, len(messages), window):
            part = messages[start : start + window]
            results = [run(task) for task in await handler.arrange(part, PendingContext())]
            for result in results:
                reports += (await handler.on_task_complete(result)).kafka
            for each in part:
                tasks = [r.task for r in results if each.offset in r.task.source_offsets]
                outcomes += (await handler.on_message_complete(MessageGroup(each, tasks=tasks))).files
            windows += (await handler.on_window_complete(results, part)).files
    assert {payload.path for payload in outcomes} == {"messages.jsonl"}
    assert {payload.path for payload in windows} == {"windows.jsonl"}
    return demo_check.Outputs(
        reports=[msgspec.json.decode(to_json(p.data), type=demo_check.DemoResult) for p in reports],
        outcomes=[msgspec.json.decode(to_json(p.data), type=demo_check.DemoOutcome) for p in outcomes],
        windows=[msgspec.json.decode(to_json(p.data), type=demo_check.DemoWindow) for p in windows],
        letters=[letter(position) for position, line in expected_of(lines).items() if line is None],
        committed={partition: len(lines[partition::PARTITIONS]) for partition in range(PARTITIONS)},
    )


def expected_of(lines: list[bytes]) -> dict[demo_check.Position, demo_check.DemoLine | None]:
    return demo_check.count_directly(lines, PARTITIONS)


def letter(position: demo_check.Position) -> Letter:
    source = LetterSource("access-log", *position)
    return Letter(kind=LetterKind.PARSE, error="cut off", sources=[source])


def wrong(lines: list[bytes], outputs: demo_check.Outputs) -> dict[str, int]:
    """Return the checks that fail, and by how much."""
    checks = demo_check.check(expected_of(lines), outputs)
    return {check.name: check.found - check.expected for check in checks if not check.ok}


@pytest.fixture(scope="module")
def outputs(example: ModuleType, lines: list[bytes]) -> demo_check.Outputs:
    return asyncio.run(outputs_of(example, lines, window=500))


def test_the_hooks_and_awk_agree_with_a_direct_count_of_the_input(
    lines: list[bytes], outputs: demo_check.Outputs
) -> None:
    assert wrong(lines, outputs) == {}


async def test_work_that_was_done_twice_is_counted_once(
    example: ModuleType, lines: list[bytes], outputs: demo_check.Outputs
) -> None:
    """The same windows again, and windows cut elsewhere, as after a crash."""
    again = await outputs_of(example, lines[:3000], window=70)
    twice = demo_check.Outputs(
        reports=[*outputs.reports, *outputs.reports[:50], *again.reports],
        outcomes=[*outputs.outcomes, *again.outcomes],
        windows=[*outputs.windows, *again.windows],
        letters=[*outputs.letters, *outputs.letters],
        committed=outputs.committed,
    )
    assert wrong(lines, twice) == {}


def test_every_fault_is_found(lines: list[bytes], outputs: demo_check.Outputs) -> None:
    report = outputs.reports[0]
    bad = msgspec.structs.replace(report, bytes=report.bytes + 1)
    change = msgspec.structs.replace
    found = wrong(lines, change(outputs, reports=[bad, *outputs.reports[1:]]))
    assert found == {
        f"bytes with status {report.status}": 1,
        "bytes in all": 1,
        "awk results that are wrong": 1,
    }
    lost = wrong(lines, change(outputs, reports=outputs.reports[1:]))
    assert lost[f"lines with status {report.status}"] == -report.lines
    assert wrong(lines, change(outputs, outcomes=outputs.outcomes[1:])) == {"lines with an outcome": -1}
    assert wrong(lines, change(outputs, committed={**outputs.committed, 3: 2499})) == {"offsets committed": -1}
    assert wrong(lines, change(outputs, letters=[])) == {"malformed lines dead-lettered": -1}
    more = [*outputs.letters, letter((0, 0))]
    assert wrong(lines, change(outputs, letters=more)) == {"other lines dead-lettered": 1}
    assert "lines in window summaries" in wrong(lines, change(outputs, windows=outputs.windows[1:]))


def test_the_configuration_is_valid() -> None:
    document = yaml.safe_load((find_example() / "tidemill.yaml").read_text())
    settings = Settings.model_validate(document)
    assert set(settings.sinks.kafka) == {"results"}
    assert set(settings.sinks.filesystem) == {"output"}


def test_the_data_is_what_the_source_note_says_it_is() -> None:
    folder = find_example()
    with gzip.open(folder / "access.log.gz") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    assert digest in (folder / "SOURCE.md").read_text()
