"""Records which triggers did not accept an event of a shared stream over Kafka, for dead letters and errors.

Invariants: no trigger is blamed for leaving an event unread; the error text of a letter is bounded, whatever a trigger
raised, and contains no recognisable secret, no NUL and no lone surrogate.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidemill.config.redaction import redact_text
from tidemill.core.streams.redelivery_items import OffsetDelivery, Overdue
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import TopicPartition
from tidemill.triggers.shared_stream import AdvanceOutcome

#: The limit for the error text of one trigger.
MAX_ERROR_CHARACTERS: Final = 500
#: The number of triggers that a letter names; further ones are only counted.
MAX_NAMED: Final = 5
_MAX_NAME_CHARACTERS: Final = 200


@dataclass(slots=True)
class DeliveryBlame:
    """The triggers that did not accept one delivery of an event.

    Attributes:
        failures: Triggers that failed or rejected it, with the error.
        unread: Triggers that never read it.
    """

    failures: dict[Hashable, str] = field(default_factory=dict)
    unread: set[Hashable] = field(default_factory=set)

    @property
    def left_unread(self) -> int:
        """The number of triggers that never read the event; 0 if any trigger failed it."""
        return 0 if self.failures else len(self.unread)

    @property
    def names(self) -> set[Hashable]:
        """The triggers in `failures` and `unread`."""
        return self.unread.union(self.failures)


def build_letter(
    delivery: OffsetDelivery[TopicPartition, SourceMessage], outcome: AdvanceOutcome, blame: DeliveryBlame
) -> Letter:
    """Return the dead letter for an event.

    Args:
        delivery: The last delivery of the event.
        outcome: The outcome of that delivery.
        blame: The triggers that failed or rejected it.
    """
    rejected = outcome.rejected > 0
    return Letter.about(
        [delivery.held],
        LetterKind.REJECTED if rejected else LetterKind.FAILED,
        _describe_reject(outcome, blame) if rejected else _describe_failure(delivery.failures, blame),
        attempts=delivery.failures + rejected,
    )


def build_unreadable_letter(message: SourceMessage, error: str) -> Letter:
    """Return the dead letter for a message that no trigger receives, because its headers cannot be read."""
    return Letter.about([message], LetterKind.PARSE, error)


def describe_absence(overdue: Overdue[TopicPartition, SourceMessage], seconds: float) -> str:
    """Return the error for an event whose subscribers did not return in time."""
    (topic, partition), offset = overdue.delivery.lane, overdue.delivery.offset
    event = f"the event at offset {offset} of topic {topic!r}, partition {partition}"
    if not overdue.missing:
        return f"no trigger subscribed for {event} within {seconds:g} s; the stream ends without committing it"
    names = ", ".join(sorted(str(name) for name in overdue.missing))
    return (
        f"{event} waits for {names}, which failed it or left it unread and did not subscribe again within "
        f"{seconds:g} s; the stream ends without committing it, and the next stream reads it again"
    )


def _describe_reject(outcome: AdvanceOutcome, blame: DeliveryBlame) -> str:
    if not blame.failures:
        return "a trigger rejected the event"
    if outcome.failed > len(blame.unread):
        # Some of these triggers failed the event rather than rejecting it; which ones is unknown.
        return f"a trigger rejected the event; errors of this delivery: {_describe_failures(blame.failures)}"
    return f"the event was rejected by {_describe_failures(blame.failures)}"


def _describe_failure(failures: int, blame: DeliveryBlame) -> str:
    times = "once" if failures == 1 else f"{failures} times"
    if not blame.failures:
        return f"the event failed {times}"
    where = "in" if failures == 1 else "most recently in"
    return f"the event failed {times}, {where} {_describe_failures(blame.failures)}"


def _describe_failures(failures: Mapping[Hashable, str]) -> str:
    named = [
        f"trigger {_clean_text(str(name), _MAX_NAME_CHARACTERS)}: {_clean_text(error, MAX_ERROR_CHARACTERS)}"
        for name, error in list(failures.items())[:MAX_NAMED]
    ]
    if len(failures) > MAX_NAMED:
        named.append(f"and {len(failures) - MAX_NAMED} more triggers")
    return "; ".join(named)


def _clean_text(text: str, most_characters: int) -> str:
    # Cut before masking, which is slow, and again after it; an early tight cut could make a secret unrecognisable.
    text = text[: 4 * most_characters].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    text = redact_text(text)
    return text if len(text) <= most_characters else f"{text[: most_characters - 3]}..."
