"""Checks a run of the access-log example against a direct count of its input.

Compares three counts that share no code: the input file split at its quotes (here), the messages as parsed by the
example's model, and awk's sums. Lines are identified by (partition, offset), so that work that was done twice, which
at-least-once allows, is counted once. Pure.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidemill.deadletters.letter import Letter

Position = tuple[int, int]


class DemoLine(NamedTuple):
    """The counted fields of a well-formed line."""

    status: int
    size: int


class DemoResult(msgspec.Struct):
    """One awk result, from the result topic."""

    task_id: str
    status: int
    partition: int
    offsets: list[int]
    lines: int
    bytes: int
    seconds: float

    @property
    def positions(self) -> list[Position]:
        """The positions of the counted lines."""
        return [(self.partition, offset) for offset in self.offsets]


class DemoOutcome(msgspec.Struct):
    """The outcome of a line, from the output file."""

    partition: int
    offset: int
    status: int
    bytes: int
    outcome: str


class DemoWindow(msgspec.Struct):
    """The summary of a window, from the output file."""

    partition: int
    first_offset: int
    last_offset: int


class Outputs(msgspec.Struct):
    """All outputs of a run."""

    reports: list[DemoResult]
    outcomes: list[DemoOutcome]
    windows: list[DemoWindow]
    letters: list[Letter]
    committed: dict[int, int]


class Check(msgspec.Struct):
    """An expected and a found number."""

    name: str
    expected: int
    found: int

    @property
    def ok(self) -> bool:
        """Whether the numbers are equal."""
        return self.expected == self.found


class Totals(msgspec.Struct):
    """Lines and bytes per status code."""

    lines: Counter[int] = msgspec.field(default_factory=Counter)
    bytes: Counter[int] = msgspec.field(default_factory=Counter)

    def add(self, status: int, lines: int, size: int) -> None:
        self.lines[status] += lines
        self.bytes[status] += size


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a gzip file without line breaks."""
    with gzip.open(path) as file:
        return file.read().splitlines()


def count_directly(lines: Iterable[bytes], partitions: int) -> dict[Position, DemoLine | None]:
    """Return each line's status and bytes, or None for a malformed line; lines go to partitions in turn."""
    return {(number % partitions, number // partitions): _count_line(line) for number, line in enumerate(lines)}


def _count_line(line: bytes) -> DemoLine | None:
    # A well-formed line has three quoted fields, so six unescaped quotes, the last one at its end.
    parts = line.replace(rb"\"", b"").split(b'"')
    if len(parts) != 7 or parts[6]:
        return None
    status, size = parts[2].split()
    return DemoLine(int(status), 0 if size == b"-" else int(size))


def add_up_input(expected: Mapping[Position, DemoLine | None]) -> Totals:
    """Add up the well-formed lines of the input."""
    totals = Totals()
    for line in expected.values():
        if line is not None:
            totals.add(line.status, 1, line.size)
    return totals


def add_up_reports(reports: Sequence[DemoResult], outcomes: Sequence[DemoOutcome]) -> Totals:
    """Add up awk's counts; lines that an earlier report has counted are subtracted with their sizes."""
    sizes = {(outcome.partition, outcome.offset): outcome.bytes for outcome in outcomes}
    totals, seen = Totals(), set[Position]()
    for report in {report.task_id: report for report in reports}.values():
        again = seen.intersection(report.positions)
        seen.update(report.positions)
        known = sum(sizes.get(position, 0) for position in again)
        totals.add(report.status, report.lines - len(again), report.bytes - known)
    return totals


def check(expected: Mapping[Position, DemoLine | None], outputs: Outputs) -> list[Check]:
    """Compare all numbers of a run."""
    good = {position: line for position, line in expected.items() if line is not None}
    want, found = add_up_input(expected), add_up_reports(outputs.reports, outputs.outcomes)
    committed = sum(max(offset, 0) for offset in outputs.committed.values())
    checks = [Check("offsets committed", len(expected), committed)]
    for status in sorted(set(want.lines) | set(found.lines)):
        checks.append(Check(f"lines with status {status}", want.lines[status], found.lines[status]))
        checks.append(Check(f"bytes with status {status}", want.bytes[status], found.bytes[status]))
    checks.append(Check("bytes in all", want.bytes.total(), found.bytes.total()))
    checks.append(Check("awk results that are wrong", 0, _count_wrong(good, outputs.reports)))
    checks.append(Check("lines with an outcome", len(good), len(_find_right_outcomes(good, outputs.outcomes))))
    checks.append(Check("lines in window summaries", len(good), len(_find_in_windows(good, outputs.windows))))
    bad = set(expected) - set(good)
    lettered = {(s.partition, s.offset) for letter in outputs.letters for s in letter.sources}
    checks.append(Check("malformed lines dead-lettered", len(bad), len(bad & lettered)))
    checks.append(Check("other lines dead-lettered", 0, len(lettered - bad)))
    return checks


def find_slowest(reports: Iterable[DemoResult], count: int = 5) -> list[DemoResult]:
    """Return the reports of the slowest tasks."""
    return sorted(reports, key=lambda report: -report.seconds)[:count]


def _count_wrong(good: Mapping[Position, DemoLine], reports: Iterable[DemoResult]) -> int:
    """Count the reports that differ from the input at the positions that they name."""
    wrong = 0
    for report in reports:
        lines = [good.get(position) for position in report.positions]
        size = sum(line.size for line in lines if line is not None)
        statuses = {line.status if line is not None else None for line in lines}
        wrong += (report.lines, report.bytes, statuses) != (len(lines), size, {report.status})
    return wrong


def _find_right_outcomes(good: Mapping[Position, DemoLine], outcomes: Iterable[DemoOutcome]) -> set[Position]:
    return {
        position
        for outcome in outcomes
        if good.get(position := (outcome.partition, outcome.offset)) == (outcome.status, outcome.bytes)
        and outcome.outcome == "done"
    }


def _find_in_windows(good: Mapping[Position, DemoLine], windows: Iterable[DemoWindow]) -> set[Position]:
    named = {
        (window.partition, offset)
        for window in windows
        for offset in range(window.first_offset, window.last_offset + 1)
    }
    return named & set(good)
