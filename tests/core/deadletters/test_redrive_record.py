"""What a redrive saves: an unsent letter is never claimed, whatever has no room."""

from __future__ import annotations

import random

import pytest
from tests.core.examples import examples

from tidemill.core.deadletters.redrive import Facts, LetterCriteria
from tidemill.core.deadletters.redrive_record import RedrivenRange, RedriveRecord, decode_record


def facts(kind: str = "task") -> Facts:
    return Facts("some", kind)


def test_a_letter_was_sent_by_the_last_run_over_it():
    record = RedriveRecord("source", LetterCriteria())
    record.note_range(0, 10, 1_000.5)
    record.note_range(10, 20, 1_010.0)
    record.note_range(20, 30, 2_000.0)
    record.note_range(5, 7, 3_000.0)
    record.note_range(7, 7, 4_000.0)
    assert record.runs == [RedrivenRange(0, 20, 1_010), RedrivenRange(20, 30, 2_000), RedrivenRange(5, 7, 3_000)]
    assert [record.find_sent_at(offset, facts()) for offset in (0, 5, 6, 7, 25, 30)] == [
        1_010,
        3_000,
        3_000,
        1_010,
        2_000,
        None,
    ]


def test_a_letter_that_does_not_match_or_was_refused_was_not_sent():
    record = RedriveRecord("sink", LetterCriteria(kinds=("delivery",)))
    record.note_range(0, 10, 1_000.0, [3])
    record.note_unsent(4)
    assert record.find_sent_at(2, facts("delivery")) == 1_000
    assert record.find_sent_at(2, facts("task")) is None
    assert record.find_sent_at(3, facts("delivery")) is None
    assert record.find_sent_at(4, facts("delivery")) is None


def test_a_letter_that_is_sent_later_is_no_longer_unsent():
    record = RedriveRecord("source", LetterCriteria())
    record.note_range(0, 20, 1_000.0, [3, 12])
    record.note_range(0, 10, 2_000.0)
    assert record.find_sent_at(3, facts()) == 2_000
    assert record.find_sent_at(12, facts()) is None
    record.note_range(10, 20, 2_001.0)
    assert record.find_sent_at(12, facts()) == 2_001


def test_a_record_is_decoded_as_it_was_encoded():
    asked = LetterCriteria(("ab",), ("task",), ("kafka.out",), 1.5, 2.5, ("k\ud800", "ü"), "text")
    record = RedriveRecord("other-topic", asked, [RedrivenRange(1, 5, 7)], [2])
    assert decode_record(record.encode()) == record
    assert decode_record(RedriveRecord("source", LetterCriteria()).encode()) is None


@pytest.mark.parametrize(
    "text", ["", "other", "7", "{}", '{"tidemill":2}', '{"tidemill":1,"to":"x","asked":[],"runs":[],"unsent":[]}']
)
def test_any_other_text_is_not_a_record(text: str):
    assert decode_record(text) is None


def test_a_copy_is_independent():
    record = RedriveRecord("source", LetterCriteria(), [RedrivenRange(0, 5, 7)], [2])
    record.copy().note_range(5, 9, 8.0, [6])
    assert record == RedriveRecord("source", LetterCriteria(), [RedrivenRange(0, 5, 7)], [2])


def test_what_has_no_room_is_forgotten_and_no_unsent_letter_is_claimed():
    shuffled = random.Random(7)
    for _ in range(examples(300)):
        record = RedriveRecord("source", LetterCriteria())
        sent: dict[int, int] = {}
        at = 1_000.0
        position = 0
        for _ in range(shuffled.randrange(1, 30)):
            if shuffled.random() < 0.2:
                position = shuffled.randrange(position + 1)
            end = position + shuffled.randrange(1, 60)
            for offset in range(position, end):
                sent[offset] = int(at)
            unsent = [offset for offset in range(position, end) if shuffled.random() < 0.2]
            record.note_range(position, end, at, unsent[::2])
            for offset in unsent[1::2]:
                record.note_unsent(offset)
            for offset in unsent:
                del sent[offset]
            position = end
            at += shuffled.choice((1.0, 100.0))
        room = shuffled.choice((60, 150, 400, 4_000))
        text = record.encode(room)
        assert len(text) <= room
        kept = decode_record(text)
        if kept is None:
            assert room < 4_000
            continue
        claimed = {offset for offset in range(3_000) if kept.find_sent_at(offset, facts()) is not None}
        assert claimed <= sent.keys()
        if room == 4_000 and len(record.unsent) < 100:
            assert claimed == sent.keys()
