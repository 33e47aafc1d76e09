"""The write-behind cache: the latest value or nothing, whatever the store does."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.examples import examples

from tidemill.core.pipeline.write_behind import CacheEntry, ChangeBatch, Known, PendingLoad, WriteBehind

KEYS = st.sampled_from("abcdef")


class MemoryAgainstModel(RuleBasedStateMachine):
    """A store that answers late and refuses batches; loads overlap everything."""

    @initialize(size=st.integers(1, 4), rows=st.dictionaries(KEYS, st.binary(max_size=2), max_size=6))
    def begin(self, size: int, rows: dict[str, bytes]) -> None:
        self.size = size
        self.cache = WriteBehind(size)
        self.now = 0.0
        self.store = {key: CacheEntry(value) for key, value in rows.items()}
        self.latest = dict(self.store)
        newest = list(self.store.items())[-size:]
        self.cache.start(newest, everything=len(rows) <= size)
        self.batch: ChangeBatch | None = None
        self.loads: list[tuple[PendingLoad, CacheEntry | None]] = []
        self.count = 0

    def check(self, key: str, found: bytes | Known) -> None:
        entry = self.latest.get(key)
        wanted = entry.data if entry is not None and entry.expires_at > self.now else Known.ABSENT
        if found is not Known.UNKNOWN and not self.cache.lost:
            assert found == wanted
        else:  # never an old value
            assert isinstance(found, Known) or found == wanted

    @rule(key=KEYS, ttl=st.sampled_from([math.inf, 1.0, 5.0]))
    def set(self, key: str, ttl: float) -> None:
        self.count += 1
        entry = CacheEntry(b"%d" % self.count, self.now + ttl)
        self.cache.set(key, entry)
        self.latest[key] = entry
        assert self.cache.get(key, self.now) == entry.data, "reading back is immediate"

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.cache.delete(key)
        self.latest.pop(key, None)
        assert self.cache.get(key, self.now) is Known.ABSENT

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        self.check(key, self.cache.peek(key, self.now))
        found = self.cache.get(key, self.now)
        self.check(key, found)
        if found is Known.UNKNOWN:
            self.loads.append((self.cache.begin_load(key), self.store.get(key)))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def a_load_ends(self, data: st.DataObject) -> None:
        load, entry = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.check(load.key, self.cache.end_load(load, entry, self.now))

    @rule()
    def a_batch_leaves(self) -> None:
        unwritten = self.cache.unwritten
        batch = self.cache.take()
        if self.batch is not None:
            assert batch is None, "one at a time"
            return
        assert batch is None or batch.clear or batch.changes
        assert self.cache.unwritten == unwritten
        self.batch = batch

    @rule(taken=st.booleans())
    def the_store_answers(self, taken: bool) -> None:
        batch, self.batch = self.batch, None
        if not taken:
            self.cache.note_failed()
        elif batch is not None:
            if batch.clear:
                self.store.clear()
            for key, entry in batch.changes.items():
                if entry is None:
                    self.store.pop(key, None)
                else:
                    self.store[key] = entry
            self.cache.note_written()

    @rule(seconds=st.floats(0.1, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_memory_is_bounded(self) -> None:
        if hasattr(self, "cache"):
            assert len(self.cache) <= self.size


TestMemoryAgainstModel = MemoryAgainstModel.TestCase
TestMemoryAgainstModel.settings = settings(max_examples=examples(300), stateful_step_count=50)


def test_the_least_recently_used_entry_is_evicted_and_read_from_the_store() -> None:
    cache = WriteBehind(2)
    cache.start([], everything=True)
    assert cache.get("a", 0) is Known.ABSENT, "the store was empty, so nobody asks it"
    cache.set("a", CacheEntry(b"1"))
    cache.set("b", CacheEntry(b"2"))
    cache.get("a", 0)
    cache.set("c", CacheEntry(b"3"))
    assert cache.peek("b", 0) == b"2", "it left the memory, but the store does not have it yet"
    cache.take()
    assert cache.peek("b", 0) == b"2"
    cache.note_written()
    assert [cache.peek(key, 0) for key in "abc"] == [b"1", Known.UNKNOWN, b"3"]


def test_an_entry_is_valid_until_it_expires_and_peek_does_not_refresh_it() -> None:
    cache = WriteBehind(2)
    cache.set("a", CacheEntry(b"1", 10.0))
    assert cache.peek("a", 9.9) == b"1"
    assert cache.peek("a", 10.0) is Known.ABSENT
    assert cache.get("a", 10.0) is Known.ABSENT
    cache.set("b", CacheEntry(b"2"))
    cache.set("c", CacheEntry(b"3"))
    cache.peek("b", 0)
    cache.set("d", CacheEntry(b"4"))
    cache.take()
    cache.note_written()
    assert cache.peek("b", 0) is Known.UNKNOWN


def test_an_entry_evicted_before_it_was_written_is_found_again() -> None:
    cache = WriteBehind(1)
    cache.set("a", CacheEntry(b"1"))
    cache.set("b", CacheEntry(b"2"))
    assert cache.get("a", 0) == b"1"
    assert (cache.get("b", 0), len(cache)) == (b"2", 1)


@pytest.mark.parametrize("taken", [True, False])
def test_a_change_that_is_lost_does_not_leave_an_older_one_behind(taken: bool) -> None:
    cache = WriteBehind(1)
    cache.delete("a")
    cache.take()
    cache.note_failed()
    cache.set("a", CacheEntry(b"1"))
    cache.take()
    cache.set("a", CacheEntry(b"2"))
    cache.set("b", CacheEntry(b"3"))
    assert cache.lost == 1
    assert cache.get("a", 0) is Known.ABSENT, "the latest is lost; the one on its way to the store is older"
    cache.note_written() if taken else cache.note_failed()
    assert cache.get("a", 0) is Known.ABSENT
    assert cache.take() == ChangeBatch(clear=True, changes={"b": CacheEntry(b"3")})


def test_while_the_store_fails_the_oldest_changes_are_lost_and_the_store_is_emptied_before_it_is_written() -> None:
    cache = WriteBehind(2)
    cache.set("a", CacheEntry(b"1"))
    cache.set("b", CacheEntry(b"2"))
    assert cache.is_full
    cache.take()
    cache.note_failed()
    assert not cache.is_full, "there is no hurry while the store fails"
    cache.set("a", CacheEntry(b"3"))
    assert (cache.lost, cache.unwritten) == (0, 2)
    cache.set("c", CacheEntry(b"4"))
    assert (cache.lost, cache.unwritten) == (1, 2)
    assert cache.peek("b", 0) is Known.ABSENT, "the store may have an older one"
    assert cache.take() == ChangeBatch(clear=True, changes={"a": CacheEntry(b"3"), "c": CacheEntry(b"4")})
    assert cache.take() is None
    assert cache.peek("b", 0) is Known.ABSENT
    cache.note_written()
    assert cache.peek("b", 0) is Known.UNKNOWN
    assert cache.take() is None
    cache.note_failed()
    assert cache.unwritten == 0, "no batch was on its way"


def test_a_load_that_was_overtaken_is_ignored() -> None:
    cache = WriteBehind(1)
    first, second = cache.begin_load("a"), cache.begin_load("a")
    assert first is second
    cache.set("a", CacheEntry(b"new"))
    assert cache.end_load(first, CacheEntry(b"old"), 0) == b"new"
    cache.set("b", CacheEntry(b"other"))
    cache.take()
    cache.note_written()
    assert cache.end_load(second, CacheEntry(b"old"), 0) is Known.UNKNOWN, "ask again"
    third = cache.begin_load("a")
    assert cache.end_load(third, CacheEntry(b"new"), 0) == b"new"
    assert cache.end_load(cache.begin_load("z"), None, 0) is Known.ABSENT
