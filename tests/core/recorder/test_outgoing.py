"""Frames on their way to the driver: none is lost but by the limits, and what is lost is counted."""

from __future__ import annotations

import random

from tests.core.examples import examples

from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames


def take(frames: OutgoingFrames) -> list[int]:
    """Send what may be sent; return the numbers."""
    sent = []
    while (frame := frames.take_next()) is not None:
        sent.append(frame.seq)
    return sent


def test_only_a_window_is_sent_until_it_is_confirmed() -> None:
    frames = OutgoingFrames(1000, 1000, 20)
    for _ in range(5):
        frames.add("messages", b"x" * 10, 1)
    assert take(frames) == [1, 2]
    frames.note_stored(2)
    assert take(frames) == [3]
    frames.note_stored(1)
    frames.note_stored(3)
    assert take(frames) == [4, 5]
    assert not frames.is_empty
    frames.note_stored(4)
    frames.note_stored(5)
    assert frames.is_empty
    assert (frames.size_bytes, frames.dropped) == (0, 0)


def test_what_is_not_confirmed_is_sent_again_in_order_after_a_reconnect() -> None:
    frames = OutgoingFrames(1000, 1000, 20)
    for _ in range(3):
        frames.add("tasks", b"x" * 10, 1)
    assert take(frames) == [1, 2]
    frames.note_stored(1)
    frames.note_disconnected()
    assert take(frames) == [2, 3]


def test_a_late_confirmation_spares_a_second_sending() -> None:
    frames = OutgoingFrames(1000, 1000, 1000)
    for _ in range(3):
        frames.add(EVENTS, b"x", 1)
    take(frames)
    frames.note_disconnected()
    frames.note_stored(2)
    frames.note_stored(99)
    assert take(frames) == [1, 3]


def test_an_unknown_number_changes_nothing_not_even_what_was_never_sent() -> None:
    frames = OutgoingFrames(1000, 1000, 1000)
    frames.add(EVENTS, b"x", 1)
    frames.note_stored(1)
    assert take(frames) == [1]


def test_beyond_the_bytes_the_oldest_that_were_never_sent_go_and_are_counted() -> None:
    frames = OutgoingFrames(30, 1000, 10)
    frames.add("messages", b"x" * 10, 5)
    assert take(frames) == [1]
    frames.add("messages", b"x" * 10, 7)
    frames.add(EVENTS, b"x" * 10, 2)
    frames.add("messages", b"x" * 10, 9)
    assert (frames.dropped, frames.size_bytes) == (7, 30)
    frames.note_disconnected()
    frames.add("messages", b"x" * 10, 1)
    assert frames.dropped == 9
    assert take(frames) == [1]


def test_beyond_the_events_only_events_go() -> None:
    frames = OutgoingFrames(1000, 10, 1000)
    frames.add("messages", b"x", 100)
    frames.add(EVENTS, b"x", 6)
    frames.add(EVENTS, b"x", 6)
    assert frames.dropped == 6
    assert take(frames) == [1, 3]
    frames.add(EVENTS, b"x", 5)
    assert frames.dropped == 11
    frames.add(EVENTS, b"x", 11)
    assert (frames.dropped, frames.dropped_rows) == (22, 0)


def test_a_frame_larger_than_the_limit_goes_by_itself() -> None:
    frames = OutgoingFrames(10, 10, 10)
    frames.add("tasks", b"x" * 11, 3)
    assert frames.is_empty
    assert frames.dropped == 3


def test_what_is_given_up_is_counted_sent_or_not() -> None:
    frames = OutgoingFrames(1000, 1000, 5)
    frames.add("tasks", b"x" * 10, 3)
    frames.add(EVENTS, b"x" * 10, 4)
    take(frames)
    frames.give_up()
    assert frames.is_empty
    assert (frames.dropped, frames.dropped_rows, frames.size_bytes) == (7, 3, 0)


def test_rows_that_never_become_a_frame_are_dropped_too() -> None:
    frames = OutgoingFrames(10, 10, 10)
    frames.lose(3)
    assert (frames.dropped, frames.dropped_rows, frames.is_empty) == (3, 3, True)


def test_whatever_happens_each_row_is_stored_or_counted() -> None:
    for seed in range(examples(200)):
        rng = random.Random(seed)
        frames = OutgoingFrames(rng.randrange(20, 200), rng.randrange(5, 50), rng.randrange(1, 60))
        counts: dict[int, int] = {}
        stored: set[int] = set()
        arrived: list[int] = []
        for _ in range(200):
            match rng.randrange(5):
                case 0 | 1:
                    count = rng.randrange(1, 6)
                    counts[len(counts) + 1] = count
                    frames.add(rng.choice([EVENTS, "messages"]), b"x" * rng.randrange(1, 20), count)
                case 2:
                    arrived += take(frames)
                case 3 if arrived:
                    seq = arrived.pop(rng.randrange(len(arrived)))
                    stored.add(seq)
                    frames.note_stored(seq)
                case _:
                    frames.note_disconnected()
                    arrived.clear()
        frames.note_disconnected()
        while sent := take(frames):
            for seq in sent:
                stored.add(seq)
                frames.note_stored(seq)
        assert frames.is_empty
        assert sum(counts.values()) == sum(counts[seq] for seq in stored) + frames.dropped
