"""Shares of what waits, and hand-overs."""

from __future__ import annotations

import math
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.triggers.fair_share import (
    HeldUnit,
    StreamUnit,
    TriggererLoad,
    WaitingTrigger,
    choose_claims,
    choose_moves,
    compute_share,
    find_interested,
)

loads = st.builds(TriggererLoad, st.integers(0, 60), st.integers(1, 60))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(loads, min_size=1, max_size=5), st.integers(0, 200))
def test_the_shares_cover_what_waits_or_all_free_capacity(everybody: list[TriggererLoad], waiting: int):
    shares = [
        compute_share(own, [*everybody[:number], *everybody[number + 1 :]], waiting)
        for number, own in enumerate(everybody)
    ]
    free = [max(0, load.capacity - load.held) for load in everybody]
    assert all(share <= room for share, room in zip(shares, free, strict=True))
    assert sum(shares) >= min(waiting, sum(free))
    level = max((load.held + share for load, share in zip(everybody, shares, strict=True) if share), default=0)
    for load, share, room in zip(everybody, shares, free, strict=True):
        assert load.held + share >= level - 1 or share in (room, waiting), "others take what it has room for"


@settings(max_examples=examples(200), deadline=None)
@example([(1, [1, 1, 1, 2, 2, 3, 3, 4]), (10, [1] * 4), (8, [1] * 4)], 10)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 8), max_size=12)), min_size=1, max_size=5),
    st.integers(1, 50),
)
def test_hand_overs_end_from_every_start(starts: list[tuple[int, list[int]]], limit: int):
    capacities = [capacity for capacity, _ in starts]
    held = [
        [HeldUnit(f"{host}-{number}", size) for number, size in enumerate(sizes)]
        for host, (_, sizes) in enumerate(starts)
    ]

    def load(host: int) -> TriggererLoad:
        return TriggererLoad(sum(unit.size for unit in held[host]), capacities[host])

    def squares() -> int:
        return sum(load(host).held ** 2 for host in range(len(held)))

    for _ in range(200):
        moved = False
        for host in range(len(held)):
            others = [other for other in range(len(held)) if other != host]
            chosen = choose_moves(load(host), [load(other) for other in others], held[host], limit)
            for unit in [unit for key in chosen for unit in held[host] if unit.key == key]:
                # The emptiest one that has room claims it, of equal ones the one with most room.
                target = min(
                    (other for other in others if load(other).held + unit.size <= capacities[other]),
                    key=lambda other: (load(other).held, -capacities[other]),
                )
                before, larger = squares(), load(host).held
                held[host].remove(unit)
                held[target].append(unit)
                assert load(target).held < larger
                assert squares() < before
                moved = True
        if not moved:
            return
    raise AssertionError("hand-overs do not end")


def test_a_newcomer_gets_half():
    units = [HeldUnit(number, 1) for number in range(100)]
    assert len(choose_moves(TriggererLoad(100, 100), [TriggererLoad(0, 100)], units, 1000)) == 50
    assert len(choose_moves(TriggererLoad(100, 100), [TriggererLoad(0, 100)], units, 10)) == 10
    assert len(choose_moves(TriggererLoad(100, 100), [TriggererLoad(0, 5)], units, 1000)) == 5


def test_nothing_moves_that_makes_no_triggerer_smaller():
    assert choose_moves(TriggererLoad(10, 10), [TriggererLoad(0, 10)], [HeldUnit("s", 10)], 100) == []
    assert choose_moves(TriggererLoad(54, 99), [TriggererLoad(50, 99)], [HeldUnit(1, 1)], 100) == []


def test_a_unit_waits_for_a_triggerer_that_it_fits_into():
    rows, units = [WaitingTrigger(number, "s") for number in (1, 2)], {"s": StreamUnit(4, 0)}
    own, other = TriggererLoad(7, 10), TriggererLoad(0, 10)
    assert choose_claims(rows, units, 2, 3, own, [other]).unfit == {"s"}
    assert choose_claims(rows, units, 2, 3, own, []).whole == {"s"}, "there is no other one"
    assert choose_claims(rows, units, 2, 9, other, [own]).whole == {"s"}
    assert choose_claims(rows, units, 0, 9, other, [own]).unfit == {"s"}, "it is the share of the other one"
    assert choose_claims(rows, {"s": StreamUnit(4, 1)}, 0, 9, other, [own]).triggers == (1, 2), "it is read here"


def test_a_unit_that_fits_into_the_capacity_is_claimed_as_a_whole():
    rows, units = [WaitingTrigger(number, "s") for number in (1, 2)], {"s": StreamUnit(600, 0)}
    own, other = TriggererLoad(0, 1000), TriggererLoad(0, 1000)
    choice = choose_claims(rows, units, 300, 2, own, [other])
    assert (choice.triggers, choice.whole, choice.oversized) == ((), {"s"}, frozenset())
    rows.append(WaitingTrigger(3, "t"))
    choice = choose_claims(rows, units | {"t": StreamUnit(500, 0)}, 700, 900, own, [other])
    assert (choice.whole, choice.unfit) == ({"s"}, {"t"}), "there is no room for both"
    rows.append(WaitingTrigger(4))
    choice = choose_claims(rows, units | {"t": StreamUnit(300, 0)}, 601, 900, own, [other])
    assert (choice.triggers, choice.whole) == ((), {"s", "t"}), "a unit may exceed the share"


def test_triggers_of_a_stream_that_is_read_here_are_claimed_bit_by_bit():
    rows, units = [WaitingTrigger(number, "s") for number in (1, 2, 3)], {"s": StreamUnit(3, 1)}
    own, other = TriggererLoad(1, 9), TriggererLoad(0, 9)
    choice = choose_claims(rows, units, 0, 2, own, [other])
    assert (choice.triggers, choice.whole) == ((1, 2), frozenset())


def test_one_with_the_most_room_keeps_it_for_a_unit_that_has_waited_for_long():
    rows, units = [WaitingTrigger(1, "s"), WaitingTrigger(2), WaitingTrigger(3, "t")], {"s": StreamUnit(4, 0)}
    units["t"] = StreamUnit(1, 1)
    own, other = TriggererLoad(7, 10), TriggererLoad(8, 10)
    assert choose_claims(rows, units, 3, 3, own, [other]).triggers == (2, 3)
    choice = choose_claims(rows, units, 3, 3, own, [other], {"s"})
    assert (choice.triggers, choice.kept) == ((3,), {"s"}), "what joins a stream that it reads has nobody else"
    assert choose_claims(rows, units, 3, 2, other, [own], {"s"}).triggers == (2, 3), "it has less room"
    assert choose_claims(rows, units, 3, 3, own, [TriggererLoad(0, 3)], {"s"}).kept == {"s"}, "the other is too small"
    assert choose_claims(rows, units, 3, 3, own, [TriggererLoad(0, 9)], {"s"}).kept == set(), "it fits there"
    assert choose_claims(rows, units, 3, 3, TriggererLoad(0, 3), [other], {"s"}).kept == set()
    assert choose_claims(rows[:1], {"s": StreamUnit(4, 1)}, 3, 3, own, [other], {"s"}).kept == set(), "it is read here"


def test_only_the_first_of_triggerers_with_equal_room_keeps_it():
    rows, units = [WaitingTrigger(1, "s"), WaitingTrigger(2)], {"s": StreamUnit(4, 0)}
    first, second = TriggererLoad(7, 10, 1), TriggererLoad(7, 10, 2)
    assert choose_claims(rows, units, 3, 3, first, [second], {"s"}).kept == {"s"}
    choice = choose_claims(rows, units, 3, 3, second, [first], {"s"})
    assert (choice.triggers, choice.kept) == ((2,), frozenset())


def test_the_only_triggerer_keeps_no_room():
    rows, units = [WaitingTrigger(1, "s"), WaitingTrigger(2)], {"s": StreamUnit(4, 0)}
    choice = choose_claims(rows, units, 3, 3, TriggererLoad(7, 10), [], {"s"})
    assert (choice.whole, choice.kept) == ({"s"}, frozenset())


def play_unit(capacities: list[int], life: int, size: int, chance: random.Random, patience: float) -> bool:
    """Return whether a stream is claimed in time beside small triggers that live for some turns and come again."""
    units = {"s": StreamUnit(size, 0)}
    held = [[chance.randint(1, life) for _ in range(capacity)] for capacity in capacities]
    for turn in range(10 + 3 * life):
        order = list(range(len(capacities)))
        chance.shuffle(order)
        for host in order:
            held[host] = [ends for ends in held[host] if ends > turn]
            hosts = (host, *({*order} - {host}))
            own, *others = [TriggererLoad(len(held[one]), capacities[one], one) for one in hosts]
            room = own.capacity - own.held
            share = compute_share(own, others, size + sum(capacities))
            # The triggers of the stream have waited for longer than the others, of which there are always enough.
            rows = [*(WaitingTrigger(-1 - n, "s") for n in range(size)), *map(WaitingTrigger, range(sum(capacities)))]
            late = {"s"} if turn > patience else set()
            choice = choose_claims(rows, units, share, room, own, others, late)
            if "s" in choice.whole:
                return True
            held[host] += [turn + chance.randint(1, life) for _ in choice.triggers]
    return False


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(2, 12), min_size=2, max_size=4), st.integers(1, 6), st.integers(), st.data())
def test_no_unit_starves_beside_small_triggers_that_end_and_come_again(
    capacities: list[int], life: int, seed: int, data: st.DataObject
):
    size = data.draw(st.integers(1, max(capacities)))
    assert play_unit(capacities, life, size, random.Random(seed), patience=5)


def test_a_unit_would_starve_if_no_room_was_kept():
    assert not play_unit([10, 10], 4, 8, random.Random(1), patience=math.inf)


def test_a_unit_larger_than_every_capacity_goes_to_the_emptiest_as_a_whole():
    rows, units = [WaitingTrigger(number, "s") for number in (1, 2, 3)], {"s": StreamUnit(30, 0)}
    own, other = TriggererLoad(7, 10), TriggererLoad(1, 20)
    assert choose_claims(rows, units, 1, 3, own, [other]).unfit == {"s"}
    choice = choose_claims(rows, units, 1, 1, other, [own])
    assert (choice.triggers, choice.whole, choice.oversized) == ((), {"s"}, {"s"})
    choice = choose_claims(rows, {"s": StreamUnit(3, 27)}, 1, 1, other, [own])
    assert (choice.triggers, choice.whole, choice.oversized) == ((1, 2, 3), frozenset(), {"s"}), "it is read here"


def test_of_several_units_larger_than_every_capacity_each_triggerer_takes_one():
    rows = [WaitingTrigger(1, "s"), WaitingTrigger(2, "t")]
    units = {"s": StreamUnit(30, 0), "t": StreamUnit(30, 0)}
    choice = choose_claims(rows, units, 10, 10, TriggererLoad(0, 10), [TriggererLoad(0, 10)])
    assert (choice.whole, choice.unfit) == ({"s"}, {"t"})
    assert choose_claims(rows, units, 10, 10, TriggererLoad(0, 10), []).whole == {"s", "t"}


def test_only_triggerers_that_serve_all_of_the_queues_count():
    some, all_queues, rest = TriggererLoad(1, 9), TriggererLoad(2, 9), TriggererLoad(3, 9)
    others = [(("a", "b"), some), ((), all_queues), (("c",), rest)]
    assert find_interested(("b",), others) == [some, all_queues]
    assert find_interested(("b", "c"), others) == [all_queues]
    assert find_interested((), others) == [all_queues]
