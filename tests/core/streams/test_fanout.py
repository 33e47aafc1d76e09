"""The shared log: readers compared with plain lists, and what is freed."""

from __future__ import annotations

import gc
import weakref
from operator import length_hint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.streams.fanout import CHUNK, Fanout, LogReader
from tidemill.core.streams.lazy_min import LazyMin

steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 2 * CHUNK)),
        st.tuples(st.just("read"), st.integers(0, 3), st.integers(1, 2 * CHUNK)),
        st.tuples(st.just("take"), st.integers(0, 3), st.integers(0, CHUNK)),
        st.tuples(st.just("join")),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("skip")),
    ),
    max_size=40,
)


def read(log: Fanout, reader: LogReader, count: int) -> list:
    found = []
    while len(found) < count:
        if reader.ahead:
            found.append(reader.ahead.pop().item)
            continue
        for item in reader.unread:
            found.append(item)
            if len(found) == count:
                return found
        if not log.load_more(reader):
            break
    return found


class Prepared:
    """An item in another form."""

    def __init__(self, item: int) -> None:
        self.item = item


def take(log: Fanout, reader: LogReader, count: int) -> list[Prepared]:
    """Take all at once, if nothing is left of what was taken before, and read some of it."""
    if not reader.ahead and (length_hint(reader.unread) or log.load_more(reader)):
        reader.ahead = reader.take_all(lambda items: [Prepared(item) for item in items])[::-1]
    return [reader.ahead.pop() for _ in range(min(count, len(reader.ahead)))]


@given(steps, st.integers(1, 3 * CHUNK))
def test_each_reader_sees_the_same_as_a_plain_list(script: list[tuple], max_backlog: int) -> None:
    log: Fanout = Fanout(max_backlog)
    readers: list[tuple[LogReader, list]] = []
    published = 0
    prepared: dict[int, Prepared] = {}
    for step in script:
        if step[0] == "publish":
            for _ in range(step[1]):
                late = log.publish(published)
                published += 1
                for _, unread in readers:
                    unread.append(published - 1)
                assert list(late) == [one for one, unread in readers if len(unread) > max_backlog]
                for reader in late:
                    log.leave(reader)
                readers = [pair for pair in readers if pair[0] not in late]
        elif step[0] == "join":
            reader: LogReader = LogReader(published)
            log.join(reader)
            readers.append((reader, []))
        elif step[0] == "skip" and not readers:
            log.skip()
            published += 1
        elif step[0] == "leave" and readers:
            log.leave(readers.pop(step[1] % len(readers))[0])
        elif step[0] == "read" and readers:
            reader, unread = readers[step[1] % len(readers)]
            assert list(reader.yield_unread()) == unread
            assert read(log, reader, step[2]) == unread[: step[2]]
            del unread[: step[2]]
        elif step[0] == "take" and readers:
            reader, unread = readers[step[1] % len(readers)]
            taken = take(log, reader, step[2])
            assert [one.item for one in taken] == unread[: len(taken)]
            # It is one object for all readers.
            assert all(prepared.setdefault(one.item, one) is one for one in taken)
            del unread[: len(taken)]
        assert log.end == published
        assert log.size == len(readers)
        for reader, unread in readers:
            assert reader.position == published - len(unread)


def test_what_was_taken_at_once_counts_as_unread_until_it_is_read() -> None:
    log: Fanout = Fanout(max_backlog=3)
    reader, other = LogReader("a"), LogReader("b")
    log.join(reader)
    log.join(other)
    for item in range(3):
        log.publish(item)
    assert [one.item for one in take(log, reader, 1)] == [0]
    [first, *_] = take(log, other, 3)
    assert first.item == 0
    assert (reader.position, list(reader.yield_unread())) == (1, [1, 2])
    assert log.publish(3) == []
    assert log.publish(4) == [reader]
    assert [one.item for one in take(log, reader, 5)] == [1, 2]
    assert [one.item for one in take(log, reader, 5)] == [3, 4]
    assert take(log, reader, 5) == []


class Item:
    """An object whose release can be observed."""


def test_items_that_all_readers_have_read_are_freed() -> None:
    log: Fanout = Fanout(1000)
    readers = [LogReader(n) for n in range(2)]
    for reader in readers:
        log.join(reader)
    items = [Item() for _ in range(2 * CHUNK)]
    watched = [weakref.ref(item) for item in items]
    while items:
        log.publish(items.pop(0))
    read(log, readers[0], 5 * CHUNK)
    assert all(one() is not None for one in watched)
    read(log, readers[1], 5 * CHUNK)
    gc.collect()
    assert [one() for one in watched if one() is not None] == []


def test_a_reader_that_left_keeps_nothing_alive_and_reads_nothing_more() -> None:
    log: Fanout = Fanout(1000)
    reader: LogReader = LogReader("a")
    log.join(reader)
    item = Item()
    watched = weakref.ref(item)
    log.publish(item)
    del item
    log.leave(reader)
    log.leave(reader)
    log.skip()
    assert (watched(), log.size, log.load_more(reader), list(reader.yield_unread())) == (None, 0, False, [])


def test_a_backlog_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Fanout(0)


@given(st.lists(st.tuples(st.sampled_from(["add", "rise", "out", "top", "drop"]), st.integers(0, 60)), max_size=300))
def test_the_lowest_is_the_one_that_a_scan_finds(script: list[tuple[str, int]]) -> None:
    keys: dict[int, int] = {}
    inside: set[int] = set()
    lowest: LazyMin[int] = LazyMin(keys.get)
    for what, who in script:
        if what == "add":
            keys.setdefault(who, who % 7) if who % 5 else None
            lowest.add(who)
            inside |= {who} & keys.keys()
        elif what == "rise" and who in keys:
            keys[who] += 3
        elif what == "out" and keys.pop(who, None) is not None:
            inside.discard(who)
            lowest.note_out()
        elif what == "drop" and (top := lowest.find_top()) is not None:
            inside.discard(top)
            lowest.drop_top()
        elif what == "top":
            top = lowest.find_top()
            assert (top is None) == (not inside)
            if top is not None:
                assert keys[top] == min(keys[one] for one in inside)
        assert inside <= lowest.members
        bound = lowest.find_bound()
        assert not inside or bound <= min(keys[one] for one in inside)


def test_members_without_a_key_are_swept_out() -> None:
    keys = dict.fromkeys(range(100), 1)
    lowest: LazyMin[int] = LazyMin(keys.get)
    for who in range(100):
        lowest.add(who)
    for who in range(1, 100):
        del keys[who]
        lowest.note_out()
    assert len(lowest.members) < 40
    assert lowest.find_top() == 0
