"""The interface of where a redrive sends letters: topics or sinks.

A target prepares letters one by one, without sending anything, then sends a batch of them and saves the cursor. On the
dead letters' own brokers both happen in one transaction. Elsewhere, and where letters are files, the cursor is saved
once everything is confirmed, so a crash in between sends the letters of one batch again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.core.deadletters.redrive import Why
from tidemill.deadletters.letter import Letter

Positions = Mapping[int, int]


class RedriveItem(msgspec.Struct):
    """A letter that is ready to be sent.

    Attributes:
        letter: The letter.
        partition: Where it is in the dead-letter topic.
        offset: Where it is in the dead-letter topic.
        content: What the target sends for it.
        count: How many messages or payloads that is.
        size_bytes: About how large that is.
        where: The topic or sink it goes to, for messages.
    """

    letter: Letter
    partition: int
    offset: int
    content: Any
    count: int
    size_bytes: int
    where: str


class NotSentError(Exception):
    """A letter is not sent; `why` and the text say why."""

    def __init__(self, why: Why, text: str) -> None:
        """Keep the reason."""
        super().__init__(text)
        self.why = why


Unsent = list[tuple[RedriveItem, Why, str]]


class RedriveTarget(Protocol):
    """Where letters go."""

    def open(self) -> None:
        """Connect what `send` needs."""

    def prepare(self, letter: Letter, partition: int, offset: int) -> RedriveItem:
        """Prepare a letter, without sending anything.

        Raises:
            NotSentError: It cannot be sent.
            TidemillError: No letter can be sent.
        """

    def send(self, items: Sequence[RedriveItem], positions: Positions) -> Unsent:
        """Send letters and save the cursor; return those that were refused.

        Raises:
            TidemillError: The redrive ends here; the next one continues after the last saved cursor.
        """

    def close(self) -> None:
        """Disconnect; what is not confirmed is given up."""
