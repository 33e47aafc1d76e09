"""Event plans: numbers without gaps, identities once, fencing, and recognising what was committed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.event_plan import (
    Counter,
    Duplicate,
    EventRefusal,
    EventRefused,
    EventStored,
    NewEvent,
    make_plan,
)

events_strategy = st.lists(
    st.builds(
        NewEvent,
        st.integers(1, 4),
        st.integers(1, 2),
        st.just("null"),
        st.none() | st.sampled_from(["a", "b", "c"]),
        st.just(0),
    ),
    max_size=30,
)
counters_strategy = st.dictionaries(st.integers(1, 3), st.builds(Counter, st.integers(0, 5), st.just(1)))


def event(trigger_id: int = 1, token: int = 1, identity: str | None = None) -> NewEvent:
    return NewEvent(trigger_id, token, "null", identity, 0)


@given(st.lists(events_strategy, max_size=5), counters_strategy)
def test_over_many_transactions_numbers_have_no_gaps_and_identities_are_stored_once(
    batches: list[list[NewEvent]], start: dict[int, Counter]
) -> None:
    counters, stored, known = dict(start), [], {}
    for events in batches:
        plan = make_plan(events, counters, known)
        assert len(plan.outcomes) == len(events)
        assert len(plan.rows) == sum(isinstance(outcome, EventStored) for outcome in plan.outcomes)
        for one, outcome in zip(events, plan.outcomes, strict=True):
            match outcome:
                case EventRefused(reason):
                    expected = EventRefusal.FENCED if one.trigger_id in counters else EventRefusal.UNKNOWN_TRIGGER
                    assert reason is expected
                    assert one.trigger_id not in counters or one.token != counters[one.trigger_id].token
                case Duplicate(index):
                    numbered = {(r.trigger_id, r.identity): r.sequence_index for r in [*stored, *plan.rows]}
                    assert numbered[one.trigger_id, one.identity] == index
        stored += plan.rows
        counters |= plan.counters
        known = {(r.trigger_id, r.identity): r.sequence_index for r in stored if r.identity is not None}
    for trigger_id, counter in start.items():
        numbers = [row.sequence_index for row in stored if row.trigger_id == trigger_id]
        assert numbers == list(range(counter.next_index, counter.next_index + len(numbers)))
    identities = [(row.trigger_id, row.identity) for row in stored if row.identity is not None]
    assert len(identities) == len(set(identities))


@given(events_strategy, counters_strategy)
def test_a_plan_is_recognised_after_it_was_committed_and_only_then(
    events: list[NewEvent], counters: dict[int, Counter]
) -> None:
    plan = make_plan(events, counters, {})

    assert not plan.was_committed(None)
    assert plan.was_committed(plan.first) == bool(plan.rows)


def test_a_duplicate_of_an_older_event_gets_the_first_number() -> None:
    plan = make_plan([event(identity="a"), event(identity="b")], {1: Counter(9, 1)}, {(1, "a"): 4})

    assert plan.outcomes == [Duplicate(4), EventStored(9)]
    assert plan.counters == {1: Counter(10, 1)}


def test_the_same_identity_of_two_triggers_is_stored_for_both() -> None:
    plan = make_plan([event(1, identity="a"), event(2, identity="a")], {1: Counter(0, 1), 2: Counter(0, 1)}, {})

    assert plan.outcomes == [EventStored(0), EventStored(0)]


def test_a_plan_is_recognised_by_its_own_first_row_and_not_by_another_under_the_same_number() -> None:
    plan = make_plan([event(1), event(2)], {1: Counter(0, 1), 2: Counter(0, 1)}, {})
    [first, _] = plan.rows

    assert plan.was_committed(first)
    assert not plan.was_committed(first._replace(created_us=first.created_us + 1))
