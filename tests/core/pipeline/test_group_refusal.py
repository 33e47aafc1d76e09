"""What keeps a member out of its group for good, and what to do about it."""

from __future__ import annotations

import pytest

from tidemill.core.pipeline.group_refusal import GroupFacts, GroupTerms, JoinWatch, describe_refusal, find_refusal

TERMS = GroupTerms("orders-workers", "orders", 4_000)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("INVALID_SESSION_TIMEOUT", ["kafka.session_timeout_ms 4000", "group.min.session.timeout.ms"]),
        ("INCONSISTENT_GROUP_PROTOCOL", ["'orders-workers'", "cooperative-sticky", "kafka.consumer_group"]),
        ("GROUP_AUTHORIZATION_FAILED", ["'orders-workers'", "grant Read"]),
        ("GROUP_MAX_SIZE_REACHED", ["'orders-workers'", "group.max.size"]),
        ("INVALID_GROUP_ID", ["'orders-workers'", "kafka.consumer_group"]),
        ("TOPIC_AUTHORIZATION_FAILED", ["'orders'", "grant Read"]),
    ],
)
def test_a_refusal_names_what_is_refused_and_what_to_do(code: str, named: list[str]) -> None:
    text = describe_refusal(code, TERMS) or ""
    assert all(each in text for each in named), text


@pytest.mark.parametrize("code", ["REBALANCE_IN_PROGRESS", "_TRANSPORT", "UNKNOWN_TOPIC_OR_PART", ""])
def test_an_error_that_passes_is_not_a_refusal(code: str) -> None:
    assert describe_refusal(code, TERMS) is None
    watch = JoinWatch(TERMS)
    assert not watch.note_error(code)
    assert watch.refusal is None


def test_a_refusal_stands_until_the_member_has_joined() -> None:
    watch = JoinWatch(TERMS)
    assert watch.note_error("GROUP_MAX_SIZE_REACHED")
    assert not watch.note_error("_TRANSPORT")
    assert "group.max.size" in (watch.refusal or "")
    watch.note_joined(has_partitions=False)
    assert watch.refusal is None


def test_a_topic_that_may_not_be_read_is_one_until_partitions_or_messages_come() -> None:
    watch = JoinWatch(TERMS)
    watch.note_error("TOPIC_AUTHORIZATION_FAILED")
    watch.note_joined(has_partitions=False)
    assert watch.refusal is not None
    watch.note_joined(has_partitions=True)
    assert watch.refusal is None
    watch.note_error("TOPIC_AUTHORIZATION_FAILED")
    watch.note_messages()
    assert watch.refusal is None


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (GroupFacts(forbidden=True), ["grant Read"]),
        (GroupFacts(session_timeouts_ms=(6_000, 60_000)), ["is 4000", "6000 to 60000"]),
        (GroupFacts(session_timeouts_ms=(1_000, 3_000)), ["is 4000", "1000 to 3000"]),
        (GroupFacts(protocol="range", others=("billing-1",), members=1), ["(billing-1)", "the range assignor"]),
        (GroupFacts(protocol="range", others=("a", "b", "c", "d", "e"), members=5), ["(a, b, c and 2 more)"]),
        (GroupFacts(members=3, max_members=3, others=("w2.0",)), ["group.max.size"]),
    ],
)
def test_what_would_refuse_a_member_is_known_before(facts: GroupFacts, named: list[str]) -> None:
    text = find_refusal(facts, TERMS) or ""
    assert all(each in text for each in named), text


@pytest.mark.parametrize(
    "facts",
    [
        GroupFacts(),
        GroupFacts(session_timeouts_ms=(4_000, 4_000)),
        GroupFacts(protocol="cooperative-sticky", others=("w2.0",), members=1, max_members=2),
        GroupFacts(protocol="", others=("w2.0",), members=1),
        GroupFacts(protocol="range"),
        GroupFacts(members=3, max_members=3),
    ],
    ids=["nothing known", "just allowed", "room left", "being negotiated", "nobody there", "its own members"],
)
def test_nothing_is_said_against_a_group_that_would_accept(facts: GroupFacts) -> None:
    assert find_refusal(facts, TERMS) is None
