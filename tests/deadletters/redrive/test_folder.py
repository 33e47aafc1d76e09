"""Redrives of letters in files: each goes once, whatever is added, killed or torn; to a sink, without a broker."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.jsonl import read_lines
from tests.letters import letter, write

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import LetterCriteria, RedriveTally, Target, UnsentReason
from tidemill.core.errors import ConfigError, FencedError, RemoteError
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.payloads import encode_payload
from tidemill.deadletters.redrive import run as redrive_module
from tidemill.deadletters.redrive.folder_cursor import FolderCursor
from tidemill.deadletters.redrive.history import read_history
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.deadletters.redrive.sinks import SinkTarget
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.sinks.payloads import FilePayload
from tidemill.testing.kafka import consume, unique_name


def delivery(number: int, **fields: Any) -> Letter:
    """Return a letter about a line that a file sink refused."""
    payload = encode_payload(FilePayload(path="out.jsonl", data={"n": number}))
    given = {"kind": LetterKind.DELIVERY, "sink_type": "filesystem", "sink_name": "out", "original_payloads": [payload]}
    return letter(number, **{**given, **fields})


class Place:
    """A folder of letters, a file sink, and no broker."""

    def __init__(self, folder: Path) -> None:
        self.letters = folder / "letters"
        self.letters.mkdir()
        self.out = folder / "out" / "out.jsonl"
        self.settings = Settings.model_validate(
            {
                "kafka": {"brokers": f"127.0.0.1:{free_port()}"},
                "sinks": {"filesystem": {"out": {"base_path": str(folder / "out")}}},
                "dlq": {"path": str(self.letters)},
            }
        )

    def write(self, numbers: range, run: str = "r1", **fields: Any) -> None:
        letters = [delivery(number, timestamp=f"2026-01-0{run[-1]}T00:00:00+00:00", **fields) for number in numbers]
        half = len(letters) // 2
        write(self.letters, letters[:half], letters[half:], run=run)

    def redrive(self, **order: Any) -> RedriveTally:
        return Redrive(self.settings, RedriveOrder(**{"target": Target.SINK, **order})).run()

    def sent(self) -> Counter[int]:
        return Counter(line["n"] for line in read_lines(self.out))

    def redriven(self) -> dict[str, list[str]]:
        """Return where to each letter was sent, by the value of its message."""
        with open_letters(self.settings) as letters:
            history = read_history(self.settings, letters)
            ends = {number: end for number, (_, end) in letters.find_ranges().items()}
            found = [each for each in letters.stream({}, ends) if getattr(each, "letter", None) is not None]
            return {each.letter.sources[0].value: [sent.to for sent in history.list_redriven(each)] for each in found}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_payloads_go_to_their_sink_once_and_the_same_command_continues(place: Place) -> None:
    place.write(range(20))
    assert place.redrive(limit=7).sent == 7
    assert place.redrive().sent == 13
    assert place.redrive().sent == 0
    assert place.sent() == Counter(range(20))
    assert place.redrive(restart=True).sent == 20
    assert place.sent() == Counter([*range(20), *range(20)])


def test_files_that_come_later_shift_nothing(place: Place) -> None:
    place.write(range(100, 110), run="r5")
    assert place.redrive(limit=5).sent == 5
    # One that sorts before by name and age, one behind.
    place.write(range(10), run="r1")
    place.write(range(200, 210), run="r7")
    assert place.redrive().sent == 25
    assert place.sent() == Counter([*range(10), *range(100, 110), *range(200, 210)])


def test_a_file_that_was_replaced_starts_over(place: Place) -> None:
    place.write(range(10))
    place.redrive()
    write(place.letters, [delivery(50)], run="r1", part="part-1.parquet")
    (place.letters / "letters-r1-part-1.parquet").replace(place.letters / "letters-r1-part-0.parquet")
    assert place.redrive().sent == 1
    assert place.sent() == Counter([*range(10), 50])


def test_other_filters_are_another_redrive_with_its_own_cursor(place: Place) -> None:
    place.write(range(10))
    assert place.redrive(criteria=LetterCriteria(keys=("key-1",))).sent == 3
    assert place.redrive().sent == 10
    assert len(list(place.letters.glob("_redrive-*.jsonl"))) == 2


def test_letters_since_a_time_are_found_by_their_row_groups(place: Place) -> None:
    place.write(range(10), run="r1")
    place.write(range(10, 20), run="r3")
    since = 1_767_225_600.0 + 86_400  # 2026-01-02
    redrive = Redrive(place.settings, RedriveOrder(LetterCriteria(since=since), Target.SINK))
    assert redrive.run().sent == 10
    assert redrive.total == 10, "rows of files that are too old were looked at"


def test_a_folder_that_was_moved_has_its_cursor_with_it(place: Place, tmp_path: Path) -> None:
    place.write(range(10))
    place.redrive(limit=4)
    place.letters.rename(tmp_path / "moved")
    place.settings.dlq.path = str(tmp_path / "moved")
    assert place.redrive().sent == 6


def test_a_crash_between_sending_and_saving_repeats_one_batch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "BATCH_LETTERS", 5)
    place.write(range(20))
    saves = 0
    commit = FolderCursor.commit

    def killed(self: FolderCursor, records: Any, positions: Any) -> Any:
        nonlocal saves
        saves += 1
        if saves == 3:
            raise KeyboardInterrupt
        return commit(self, records, positions)

    with monkeypatch.context() as patch:
        patch.setattr(FolderCursor, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            place.redrive()
    place.redrive()
    assert place.sent() == Counter([*range(20), *range(10, 15)])


def test_a_journal_that_a_crash_tore_has_everything_saved_before(place: Place) -> None:
    place.write(range(20))
    place.redrive(limit=7)
    (journal,) = place.letters.glob("_redrive-*.jsonl")
    with open(journal, "a") as file:
        file.write('{"tidemill":1,"file":"letters-r1-part-0.par')
    assert place.redrive().sent == 13
    assert place.sent() == Counter(range(20))


def test_a_journal_that_is_not_understood_is_never_the_beginning(place: Place) -> None:
    place.write(range(5))
    place.redrive()
    (journal,) = place.letters.glob("_redrive-*.jsonl")
    journal.write_text("edited\n")
    with pytest.raises(ConfigError, match=r"its cursor .*jsonl cannot be read \(line 1 is not an entry.*remove it"):
        place.redrive()
    assert place.redriven() == {f"value-{n}": [] for n in range(5)}
    journal.unlink()
    assert place.redrive().sent == 5


def test_a_second_process_of_the_same_redrive_is_refused_by_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(range(5))
    said: list[str] = []
    send = SinkTarget.send

    def other(self: SinkTarget, items: Any, positions: Any) -> Any:
        if not said:
            with pytest.raises(FencedError) as refused:
                place.redrive()
            said.append(str(refused.value))
            assert place.redrive(criteria=LetterCriteria(keys=("none",))).sent == 0, "another redrive is not refused"
        return send(self, items, positions)

    monkeypatch.setattr(SinkTarget, "send", other)
    place.redrive()
    assert "is running the same redrive (tidemill-redrive-" in said[0], said
    assert place.sent() == Counter(range(5))
    assert place.redrive().sent == 0


def test_a_cursor_that_cannot_be_kept_ends_the_redrive_before_anything_is_sent(place: Place) -> None:
    place.write(range(5))
    place.redrive(limit=1)
    (journal,) = place.letters.glob("_redrive-*.jsonl")
    # What stands in the way of writing, as a read-only folder would; root may write to those.
    journal.with_suffix(".new").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be saved next to the letters, in .*nothing was sent"):
        place.redrive()
    assert place.sent() == Counter([0])


def test_a_full_disk_ends_the_redrive_which_continues_after_the_last_save(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(range(5))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tidemill.deadletters.redrive.folder_cursor.os.fsync", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            place.redrive()
    opened = FolderCursor.open

    def open_then_full(self: FolderCursor) -> None:
        opened(self)
        patch.setattr("tidemill.deadletters.redrive.folder_cursor.os.fsync", full)

    with monkeypatch.context() as patch:
        patch.setattr(FolderCursor, "open", open_then_full)
        with pytest.raises(RemoteError, match="cannot be written: No space left on device; run the same command"):
            place.redrive()
    assert set(place.sent()) == set(range(5))


def test_what_was_sent_when_and_where_to_is_told(place: Place) -> None:
    place.write(range(4))
    place.redrive(criteria=LetterCriteria(keys=("key-1",)))
    place.redrive(limit=3)
    assert place.redriven() == {
        "value-0": ["sink"],
        "value-1": ["sink", "sink"],
        "value-2": ["sink"],
        "value-3": [],
    }


def test_what_is_not_a_letter_is_counted_and_passed_over(place: Place) -> None:
    place.write(range(3))
    (place.letters / "notes.txt").write_text("mine")
    tally = place.redrive()
    assert (tally.sent, tally.why) == (3, {UnsentReason.NO_LETTER: 1})


def test_a_file_that_can_be_read_again_is_sent_then(place: Place) -> None:
    place.write(range(3))
    path = place.letters / "letters-r1-part-0.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    assert place.redrive().sent == 0
    path.write_bytes(whole)
    assert place.redrive().sent == 3


def test_a_dry_run_sends_saves_and_locks_nothing(place: Place) -> None:
    place.write(range(3))
    assert place.redrive(dry_run=True).sent == 3
    assert (place.sent(), list(place.letters.glob("_*"))) == (Counter(), [])


def test_a_letter_that_goes_away_while_it_is_read_ends_the_redrive(place: Place) -> None:
    place.write(range(4))
    with open_letters(place.settings) as letters:
        ends = {number: end for number, (_, end) in letters.find_ranges().items()}
        (place.letters / "letters-r1-part-0.parquet").unlink()
        with pytest.raises(RemoteError, match=r"letters-r1-part-0\.parquet is no longer readable: .*No such file"):
            list(letters.stream({}, ends))


@pytest.mark.kafka
def test_messages_go_to_their_topic_again_and_the_cursor_follows(embedded_kafka: EmbeddedBroker, place: Place) -> None:
    topic = embedded_kafka.create_topic(unique_name("in"))
    place.settings.kafka.brokers = embedded_kafka.bootstrap
    place.settings.kafka.source_topic = topic
    write(place.letters, [letter(number, topic=topic) for number in range(6)])
    assert place.redrive(target=Target.SOURCE, limit=2).messages == 2
    assert place.redrive(target=Target.SOURCE).messages == 4
    records = consume(embedded_kafka.bootstrap, topic, 6)
    assert Counter(each.value() for each in records) == Counter(b"value-%d" % number for number in range(6))
    assert dict(records[0].headers() or [])["tidemill-redrives"] == b"1"
    assert not embedded_kafka_has(embedded_kafka, f"{topic}_dlq")


def embedded_kafka_has(broker: EmbeddedBroker, topic: str) -> bool:
    from confluent_kafka.admin import AdminClient

    return topic in AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=60).topics
