"""Explains why brokers permanently refuse a member of a consumer group, and how to fix the configuration.

Kafka clients retry such a join for ever, and report the refusal as just another error.

Invariants: a refusal stands until the member joins; no text quotes data from brokers or other members, except names.
"""

from __future__ import annotations

from dataclasses import dataclass

_OF_TOPIC = "TOPIC_AUTHORIZATION_FAILED"
#: The only assignor that tidemill's members use.
ASSIGNOR = "cooperative-sticky"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The parameters with which a member joins.

    Attributes:
        group: The consumer group.
        topic: The topic that the member reads.
        session_timeout_ms: The silence after which the member counts as dead.
    """

    group: str
    topic: str
    session_timeout_ms: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The state of a group, as far as the brokers report it.

    Attributes:
        forbidden: Whether the client is not allowed to use the group.
        loading: Whether a broker that has just started is still loading its groups, so that the members are not known
            yet.
        protocol: The assignor of its members; '' without members, or while the members negotiate it.
        others: The names of members that do not belong to this pipeline.
        members: The number of members.
        max_members: The maximum number of members; None: unknown.
        session_timeouts_ms: The shortest and the longest session timeout; None: unknown.
    """

    forbidden: bool = False
    loading: bool = False
    protocol: str = ""
    others: tuple[str, ...] = ()
    members: int = 0
    max_members: int | None = None
    session_timeouts_ms: tuple[int, int] | None = None


def describe_refusal(code: str, terms: GroupTerms) -> str | None:
    """Return why a member is refused and what to do about it; None if the error is not a permanent refusal.

    Args:
        code: The name of Kafka's error.
        terms: The parameters with which the member joins.
    """
    group = f"consumer group {terms.group!r}"
    match code:
        case "INVALID_SESSION_TIMEOUT":
            return (
                f"the brokers do not allow kafka.session_timeout_ms {terms.session_timeout_ms}; set it between "
                "their group.min.session.timeout.ms (6000 by default) and group.max.session.timeout.ms"
            )
        case "INCONSISTENT_GROUP_PROTOCOL":
            return (
                f"{group} has members of another program that do not use the {ASSIGNOR} assignor; stop them or set "
                "another kafka.consumer_group"
            )
        case "GROUP_AUTHORIZATION_FAILED":
            return f"the brokers do not allow {group}; grant Read on it, or correct client_config"
        case "GROUP_MAX_SIZE_REACHED":
            return f"{group} has as many members as the brokers allow (group.max.size); run fewer engines or raise it"
        case "INVALID_GROUP_ID":
            return f"the brokers do not accept the name of {group}; set another kafka.consumer_group"
        case "TOPIC_AUTHORIZATION_FAILED":
            return f"the brokers do not allow reading topic {terms.topic!r}; grant Read on it, or correct client_config"
    return None


def find_refusal(facts: GroupFacts, terms: GroupTerms) -> str | None:
    """Return why a member would be refused if it joined now, and what to do about it; None if no reason is known."""
    if facts.forbidden:
        return describe_refusal("GROUP_AUTHORIZATION_FAILED", terms)
    if facts.session_timeouts_ms is not None:
        least, most = facts.session_timeouts_ms
        if not least <= terms.session_timeout_ms <= most:
            return (
                f"kafka.session_timeout_ms is {terms.session_timeout_ms}, but the brokers allow {least} to {most} "
                "(group.min.session.timeout.ms, group.max.session.timeout.ms)"
            )
    if facts.protocol not in ("", ASSIGNOR) and facts.others:
        more = f" and {len(facts.others) - _NAMED} more" if len(facts.others) > _NAMED else ""
        return (
            f"consumer group {terms.group!r} has members of another program "
            f"({', '.join(facts.others[:_NAMED])}{more}) that use the {facts.protocol} assignor instead of "
            f"{ASSIGNOR}; stop them or set another kafka.consumer_group"
        )
    if facts.max_members is not None and facts.members >= facts.max_members and facts.others:
        return describe_refusal("GROUP_MAX_SIZE_REACHED", terms)
    return None


class JoinWatch:
    """Tracks whether a member is refused.

    Args:
        terms: The parameters with which the member joins.

    Attributes:
        refusal: Why the member is refused and what to do about it; None while no refusal is known.
    """

    def __init__(self, terms: GroupTerms) -> None:
        self._terms = terms
        self._code = ""
        self.refusal: str | None = None

    def note_error(self, code: str) -> bool:
        """Process an error of the consumer, given by name; return whether it is a refusal."""
        refusal = describe_refusal(code, self._terms)
        if refusal is None:
            return False
        self._code, self.refusal = code, refusal
        return True

    def note_joined(self, *, has_partitions: bool) -> None:
        """Process a successful join. A member that may not even describe the topic joins without partitions."""
        if has_partitions or self._code != _OF_TOPIC:
            self.refusal = None

    def note_messages(self) -> None:
        """Clear the refusal: messages arrived."""
        self.refusal = None
