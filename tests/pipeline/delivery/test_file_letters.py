"""Dead letters as files: what a part's outcomes tell of has its letters, once, whatever died on the way; no broker."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.letters import letter, write
from tests.pipeline.test_bounded import NAMES, Copy, Refusing, finish
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.core.ranges import OffsetRange, find_remaining
from tidemill.deadletters.files import LettersTarget, ensure_outcomes_id
from tidemill.deadletters.folder_reader import FolderReader
from tidemill.deadletters.letter import Letter, decode_letter
from tidemill.deadletters.reader import FoundLetter
from tidemill.pipeline.bounded import BoundedEngine, make_bounded_settings
from tidemill.pipeline.delivery import file_letters
from tidemill.pipeline.delivery.file_letters import FileDeadLetters
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.reports.outcomes import OutcomeFile, Outcomes, find_finished_ranges
from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.identity import EngineIdentity, new_engine_id
from tidemill.runtime.link.progress import StopReason
from tidemill.sources.bounded import BoundedSource
from tidemill.sources.rows import RowReader

TOPIC = "orders"
PART = "part-00000.parquet"
Message = tuple[int, int]


class Run:
    """One bounded run in a folder: its outcomes, and letters beside those of other runs."""

    def __init__(self, folder: Path, run: str = "aaaaaaaa", outcomes: str = "outcomes") -> None:
        self.run = run
        self.outcomes = folder / outcomes
        self.outcomes.mkdir(exist_ok=True)
        self.outcomes_id = ensure_outcomes_id(self.outcomes, run)
        self.letters = folder / "letters"
        self.settings = make_bounded_settings(
            Settings.model_validate(
                {
                    "kafka": {"brokers": f"127.0.0.1:{free_port()}", "source_topic": TOPIC},
                    "sinks": {"filesystem": {"out": {"base_path": str(folder / "out")}}},
                    "executor": {"window_size": 50, "drain_timeout_seconds": 1, "max_executors": 50},
                    "dlq": {"path": str(self.letters)},
                }
            )
        )

    def engine(self, handler: Handler[Any, Any], *ranges: OffsetRange, whole: bool = False) -> BoundedEngine:
        """Return an engine with a file for each range, or one for the `whole`."""
        rows = [(b"k", b"{}", TOPIC, part.partition, n) for part in ranges for n in range(part.start, part.end)]
        parts = {} if whole else {(TOPIC, part.partition): part for part in ranges}
        identity = EngineIdentity("w", 0, new_engine_id(), "g", 1)
        place = LettersTarget(str(self.letters), self.run, str(self.outcomes), self.outcomes_id)
        letters = FileDeadLetters(place, identity.engine_id, parts)
        report = Outcomes(self.outcomes, identity, name=PART if whole else None, ranges=parts, letters=letters)
        source = BoundedSource(RowReader(iter(rows), NAMES, 0), self.settings.executor.max_queued_bytes)
        return BoundedEngine(self.settings, handler, identity, source, report)

    def told(self) -> list[Message]:
        """Return the messages that outcomes call rejected."""
        rows = [row for path in self.outcomes.glob("part-*") for row in pq.read_table(path).to_pylist()]
        return [(row["partition"], row["offset"]) for row in rows if row["status"] == "rejected"]

    def found(self) -> list[FoundLetter]:
        return found_in(self.letters)


def found_in(folder: Path) -> list[FoundLetter]:
    with FolderReader(str(folder)) as letters:
        ends = {number: end for number, (_, end) in letters.find_ranges().items()}
        return [each for each in letters.stream({}, ends) if isinstance(each, FoundLetter)]


def messages_of(found: list[FoundLetter]) -> list[Message]:
    letters = [each.letter for each in found if each.letter is not None]
    assert len(letters) == len(found), [each.problem for each in found]
    return [(source.partition, source.offset) for each in letters for source in each.sources]


def refused(part: OffsetRange) -> set[Message]:
    """Return the messages of a range that `Refusing` refuses when each window has ten of them."""
    return {(part.partition, n) for n in range(part.start, part.end) if n % 10 == 3}


async def test_letters_of_a_part_are_in_one_file_that_its_outcomes_name_and_no_broker_is_needed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = run.engine(Refusing(), OffsetRange(0, 0, 60), whole=True)
    summary = await finish(engine)
    assert (summary.reason, engine.complete) == (StopReason.DRAINED, True)
    assert summary.progress.dead_lettered == 6
    assert sorted(messages_of(run.found())) == sorted(run.told()) == sorted(refused(OffsetRange(0, 0, 60)))
    (path,) = run.letters.iterdir()
    assert engine.letters == [path.name] == [f"letters-aaaaaaaa-{PART}"]
    rows = pq.read_table(path).to_pylist()
    first = rows[0]
    told = decode_letter(first["letter"].encode())
    assert first["kind"] == "arrange"
    assert first["error"].startswith("ValueError: not this one (tests/pipeline/")
    assert (first["topic"], first["partition"], first["offset"]) == (TOPIC, 0, 3)
    assert first["letter_id"] == told.letter_id
    assert first["written_at"].isoformat(timespec="milliseconds") == told.timestamp


async def test_a_part_without_letters_has_no_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = run.engine(Copy(), OffsetRange(0, 0, 60), whole=True)
    await finish(engine)
    assert engine.complete
    assert (list(run.letters.iterdir()), engine.letters) == ([], [])


async def test_a_crash_between_the_two_names_leaves_letters_that_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: OutcomeFile, name: str, letters: str = "") -> None:
        raise OSError(5, "Input/output error")

    run, part = Run(tmp_path), OffsetRange(0, 0, 60)
    with monkeypatch.context() as patch:
        patch.setattr(OutcomeFile, "publish", crash)
        summary = await finish(run.engine(Refusing(), part, whole=True))
    assert summary.reason is StopReason.FAILED
    assert [path.name for path in run.letters.iterdir()] == [f"letters-aaaaaaaa-{PART}"]
    assert run.found() == []
    await finish(run.engine(Refusing(), part, whole=True))
    assert sorted(messages_of(run.found())) == sorted(refused(part))


async def test_a_crash_before_both_names_leaves_nothing_to_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    place = LettersTarget(str(run.letters), run.run, str(run.outcomes), run.outcomes_id)
    killed = FileDeadLetters(place, "killed")
    killed.put(letter(1), lambda: None)
    await asyncio.to_thread(killed._write_rows)
    assert [path.name[0] for path in run.letters.iterdir()] == ["_"]
    assert run.found() == []


@pytest.mark.parametrize("again", [Refusing, Copy])
async def test_a_part_that_is_retried_replaces_its_letters(tmp_path: Path, again: type[Copy]) -> None:
    run, part = Run(tmp_path), OffsetRange(0, 0, 60)
    # The first try published everything, and died before it could say so.
    await finish(run.engine(Refusing(), part, whole=True))
    await finish(run.engine(again(), part, whole=True))
    wanted = sorted(refused(part)) if again is Refusing else []
    assert sorted(messages_of(run.found())) == sorted(run.told()) == wanted
    # The letters of the first try do not come back with the end of the outcomes.
    for path in run.outcomes.iterdir():
        path.unlink()
    run.outcomes.rmdir()
    assert sorted(messages_of(run.found())) == wanted


async def test_two_runs_into_one_folder_keep_the_letters_of_both(tmp_path: Path) -> None:
    first, second = Run(tmp_path, "aaaaaaaa", "one"), Run(tmp_path, "bbbbbbbb", "two")
    for run in (first, second):
        await finish(run.engine(Refusing(), OffsetRange(0, 0, 60), whole=True))
    assert Counter(messages_of(first.found())) == Counter(dict.fromkeys(refused(OffsetRange(0, 0, 60)), 2))


@pytest.mark.parametrize("replaced", [False, True])
async def test_letters_outlive_their_outcomes_and_a_run_into_a_folder_of_the_same_name(
    tmp_path: Path, replaced: bool
) -> None:
    run = Run(tmp_path)
    await finish(run.engine(Refusing(), OffsetRange(0, 0, 60), whole=True))
    for path in run.outcomes.iterdir():
        path.unlink()
    run.outcomes.rmdir()
    if replaced:
        await finish(Run(tmp_path, "bbbbbbbb").engine(Copy(), OffsetRange(0, 100, 130), whole=True))
    assert sorted(messages_of(run.found())) == sorted(refused(OffsetRange(0, 0, 60)))


class StuckAndRefusing(Copy):
    """Refuses each third message of ten, and waits forever at one."""

    async def on_task_complete(self, result):
        at = tuple(result.task.metadata["at"])
        if at == (0, 150):
            await asyncio.Event().wait()
        if at[1] % 10 == 3:
            raise ValueError("not this one")
        return await super().on_task_complete(result)


class AllRefusing(StuckAndRefusing):
    async def on_task_complete(self, result):
        if result.task.metadata["at"] == [0, 150]:
            return await Copy.on_task_complete(self, result)
        return await super().on_task_complete(result)


async def test_a_range_done_in_part_has_the_letters_of_what_it_reports_and_the_rest_comes_with_the_rest(
    tmp_path: Path,
) -> None:
    run, ranges = Run(tmp_path), [OffsetRange(0, 0, 300), OffsetRange(1, 0, 40)]
    engine = run.engine(StuckAndRefusing(), *ranges)

    async def at_once() -> None:
        pass

    running = asyncio.ensure_future(engine.run(at_once))
    # Letters from above the message that is stuck are there, and must not be published.
    await until(lambda: engine.progress().dead_lettered >= 25)
    await until(lambda: engine.progress().committed.items() >= {f"{TOPIC}/0": 150, f"{TOPIC}/1": 40}.items())
    engine.drain()
    await asyncio.wait_for(running, 30)
    left = find_remaining(ranges, find_finished_ranges(path.name for path in run.outcomes.iterdir()))
    assert left == [OffsetRange(0, 150, 300)]
    done = refused(OffsetRange(0, 0, 150)) | refused(OffsetRange(1, 0, 40))
    assert Counter(messages_of(run.found())) == Counter(done)
    assert len(engine.letters) == 2
    later = Run(tmp_path, "bbbbbbbb")
    assert later.outcomes_id == "aaaaaaaa", "a backfill that goes on has the same folder"
    await finish(later.engine(AllRefusing(), *left))
    assert Counter(messages_of(run.found())) == Counter(done | refused(OffsetRange(0, 150, 300)))
    assert not [path for path in run.letters.iterdir() if path.name.startswith("_")]


async def test_an_engine_that_nobody_supervises_leaves_no_letters_of_parts(tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = run.engine(StuckAndRefusing(), OffsetRange(0, 0, 300))

    async def at_once() -> None:
        pass

    running = asyncio.ensure_future(engine.run(at_once))
    await until(lambda: engine.progress().committed == {f"{TOPIC}/0": 150})
    engine.abandon()
    engine.drain()
    await asyncio.wait_for(running, 30)
    assert list(run.letters.iterdir()) == []


async def test_memory_is_bounded_by_confirming_late_and_the_loop_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_letters, "GROUP_BYTES", 10_000)
    monkeypatch.setattr(file_letters, "SLOW_WRITE_SECONDS", 0.0)
    letters = FileDeadLetters(LettersTarget(str(tmp_path), "aaaaaaaa", str(tmp_path / "none"), "id"), "e")
    confirmed: list[int] = []

    def put(number: int) -> None:
        letters.put(letter(number, error="x" * 1_000), lambda: confirmed.append(number))

    for number in range(100):
        put(number)
    assert confirmed == [], "confirmed within the call"
    await asyncio.sleep(0)
    assert 5 < len(confirmed) < 20, "what does not fit was confirmed before it was written"
    assert "waiting for 0 s to be written" in (letters.describe_wait() or "")
    await until(lambda: len(confirmed) == 100)
    assert (letters.statistics().written, letters.describe_wait()) == (100, None)
    await letters.close()
    name = await asyncio.to_thread(letters.publish, "part-0.parquet")
    assert pq.ParquetFile(tmp_path / name).num_row_groups > 1
    assert [at for _, at in messages_of(found_in(tmp_path))] == list(range(100))


async def test_any_letter_can_be_written(tmp_path: Path) -> None:
    letters = FileDeadLetters(LettersTarget(str(tmp_path), "aaaaaaaa", str(tmp_path / "none"), "id"), "e", [("t", 0)])
    odd: list[Letter] = [
        letter(1, error="lone \ud800 and \x00", task_id="\udcff.jpg", args=["\udcff"]),
        letter(2, sources=[]),
        letter(3, topic="of another topic", error="x" * 10_000_000),
    ]
    for each in odd:
        letters.put(each, lambda: None)
    await letters.close()
    # Nobody knows what it is about, so it stays when only a part is told of.
    await asyncio.to_thread(letters.publish, "part-0.parquet", ("t", 0), 3)
    found = [each.letter for each in found_in(tmp_path)]
    assert [each.letter_id for each in found if each] == [odd[0].letter_id, odd[1].letter_id]


async def test_a_folder_that_vanishes_in_the_run_ends_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_letters, "GROUP_LETTERS", 1)
    run = Run(tmp_path)

    class Vanishing(Refusing):
        async def on_ready(self, config, sinks):
            run.letters.rmdir()
            run.letters.write_text("no folder")

    summary = await finish(run.engine(Vanishing(), OffsetRange(0, 0, 60)))
    assert summary.reason is StopReason.FAILED
    assert f"dead letters cannot be written to {run.letters}: " in (summary.error or "")
    assert not list(run.outcomes.glob("part-*")), "told of messages whose letters are lost"


async def test_a_disk_that_refuses_at_the_end_leaves_no_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    class Vanishing(Refusing):
        async def on_ready(self, config, sinks):
            run.letters.rmdir()
            run.letters.write_text("no folder")

    engine = run.engine(Vanishing(), OffsetRange(0, 0, 60), whole=True)
    summary = await finish(engine)
    assert (summary.reason, engine.complete) == (StopReason.FAILED, False)
    assert "dead letters cannot be written to" in (summary.error or "")
    assert not list(run.outcomes.glob("part-*"))


async def test_a_folder_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("no folder")
    run = Run(tmp_path)
    summary = await finish(run.engine(Refusing(), OffsetRange(0, 0, 60)))
    assert summary.reason is StopReason.CONFIG
    assert f"dlq.path: dead letters cannot be written to {run.letters}: File exists" in (summary.error or "")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the folder '.*/nowhere' does not exist: no bounded run has written to it yet"
    ):
        found_in(tmp_path / "nowhere")


Spoil = Callable[[Path], object]


def spoil_letters(path: Path) -> None:
    column = pq.read_metadata(path).row_group(0).column(7)
    start = column.dictionary_page_offset or column.data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * column.total_compressed_size)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "is not a file of dead letters, or is damaged"),
        (lambda path: path.write_bytes(b""), "is not a file of dead letters, or is damaged"),
        (lambda path: pq.write_table(pq.read_table(path).replace_schema_metadata(), path), "is not a file of dead"),
        (spoil_letters, "damaged: 2 rows of .*"),
    ],
)
def test_what_is_damaged_or_foreign_is_named_and_stops_nothing(tmp_path: Path, spoil: Spoil, said: str) -> None:
    write(tmp_path, [letter(1)], run="r1")
    spoil(write(tmp_path, [letter(2), letter(3)], run="r2"))
    write(tmp_path, [letter(4)], run="r3")
    (tmp_path / "_unfinished").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    found = found_in(tmp_path)
    assert sorted(offset for _, offset in messages_of([each for each in found if each.letter])) == [1, 4]
    (problem,) = [each for each in found if each.letter is None]
    assert problem.file == "letters-r2-part-0.parquet"
    assert re.search(said, problem.problem), problem.problem


async def test_a_letter_about_a_message_that_is_told_of_is_kept_even_if_it_is_about_later_ones_too(
    tmp_path: Path,
) -> None:
    letters = FileDeadLetters(LettersTarget(str(tmp_path), "aaaaaaaa", str(tmp_path / "none"), "id"), "e", [("t", 0)])
    both = letter(14, topic="t")
    both.sources += letter(20, topic="t").sources
    for each in (both, letter(15, topic="t")):
        letters.put(each, lambda: None)
    await letters.close()
    # Message 14 is not processed again, so nobody else would write what happened to it.
    await asyncio.to_thread(letters.publish, "part-0.parquet", ("t", 0), 15)
    assert messages_of(found_in(tmp_path)) == [(0, 14), (0, 20)]
