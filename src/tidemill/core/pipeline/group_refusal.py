"""Why brokers refuse a member of a consumer group for good: nothing but a change of the configuration, here or there,
lets it join. Clients try again for ever and report every refusal as an error among others.

Invariants: a refusal stands until the member joins; no text quotes what brokers or other members sent, except names.
"""

from __future__ import annotations

from dataclasses import dataclass

_OF_TOPIC = "TOPIC_AUTHORIZATION_FAILED"
#: The only assignor of tidemill's members.
ASSIGNOR = "cooperative-sticky"
_NAMED = 3


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What a member asks for.

    Attributes:
        group: The group.
        topic: The topic it reads.
        session_timeout_ms: After which silence it counts as dead.
    """

    group: str
    topic: str
    session_timeout_ms: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What brokers say about a group, as far as they do.

    Attributes:
        forbidden: Whether the client may not use it.
        loading: Whether a broker that has just started is still loading its groups: the members are not known yet.
        protocol: How its members share partitions; '' without members, or while that is being negotiated.
        others: The names of members that are not this pipeline's.
        members: How many members it has.
        max_members: How many it may have; None: not known.
        session_timeouts_ms: The shortest and the longest session timeout; None: not known.
    """

    forbidden: bool = False
    loading: bool = False
    protocol: str = ""
    others: tuple[str, ...] = ()
    members: int = 0
    max_members: int | None = None
    session_timeouts_ms: tuple[int, int] | None = None


def describe_refusal(code: str, terms: GroupTerms) -> str | None:
    """Return why a member is refused and what to do; None: the error is not a lasting refusal.

    Args:
        code: The name of Kafka's error.
        terms: What the member asks for.
    """
    group = f"consumer group {terms.group!r}"
    match code:
        case "INVALID_SESSION_TIMEOUT":
            return (
                f"the brokers do not allow kafka.session_timeout_ms {terms.session_timeout_ms}: it has to be between "
                "their group.min.session.timeout.ms (6000 by default) and group.max.session.timeout.ms"
            )
        case "INCONSISTENT_GROUP_PROTOCOL":
            return (
                f"{group} has members of another program, which do not share partitions by {ASSIGNOR}; stop them or "
                "set another kafka.consumer_group"
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
    """Return why a member would be refused if it joined now, and what to do; None: nothing is known against it."""
    if facts.forbidden:
        return describe_refusal("GROUP_AUTHORIZATION_FAILED", terms)
    if facts.session_timeouts_ms is not None:
        least, most = facts.session_timeouts_ms
        if not least <= terms.session_timeout_ms <= most:
            return (
                f"kafka.session_timeout_ms is {terms.session_timeout_ms}, and the brokers allow {least} to {most} "
                "(group.min.session.timeout.ms, group.max.session.timeout.ms)"
            )
    if facts.protocol not in ("", ASSIGNOR) and facts.others:
        more = f" and {len(facts.others) - _NAMED} more" if len(facts.others) > _NAMED else ""
        return (
            f"consumer group {terms.group!r} has members of another program "
            f"({', '.join(facts.others[:_NAMED])}{more}), which share partitions by {facts.protocol} and not by "
            f"{ASSIGNOR}; stop them or set another kafka.consumer_group"
        )
    if facts.max_members is not None and facts.members >= facts.max_members and facts.others:
        return describe_refusal("GROUP_MAX_SIZE_REACHED", terms)
    return None


class JoinWatch:
    """Whether one member is refused.

    Args:
        terms: What it asks for.

    Attributes:
        refusal: Why it is refused and what to do; None: it is not, as far as it is known.
    """

    def __init__(self, terms: GroupTerms) -> None:
        self._terms = terms
        self._code = ""
        self.refusal: str | None = None

    def note_error(self, code: str) -> bool:
        """Note an error of the consumer by its name; return whether it is a refusal."""
        refusal = describe_refusal(code, self._terms)
        if refusal is None:
            return False
        self._code, self.refusal = code, refusal
        return True

    def note_joined(self, *, has_partitions: bool) -> None:
        """Note that the member has joined; one that may not even look at the topic joins without partitions."""
        if has_partitions or self._code != _OF_TOPIC:
            self.refusal = None

    def note_messages(self) -> None:
        """Note that messages came."""
        self.refusal = None
