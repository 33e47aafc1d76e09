"""The interface of a redrive's target: topics or sinks.

A target prepares letters one by one, without sending anything. It then sends a batch of them and saves the cursor. On
the dead letters' own brokers both happen in one transaction. On other brokers, and if letters are files, the cursor is
saved once everything is confirmed, so a crash in between sends the letters of one batch again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.core.deadletters.redrive import UnsentReason
from tidemill.deadletters.letter import Letter

Positions = Mapping[int, int]


class RedriveItem(msgspec.Struct):
    """A letter that is ready to be sent.

    Attributes:
        letter: The letter.
        partition: The letter's partition in the dead-letter topic.
        offset: The letter's offset in the dead-letter topic.
        content: What the target sends for the letter.
        count: The number of messages or payloads.
        size_bytes: Their approximate size.
        where: The topic or sink that gets the letter, for messages.
    """

    letter: Letter
    partition: int
    offset: int
    content: Any
    count: int
    size_bytes: int
    where: str


class NotSentError(Exception):
    """A letter is not sent; `why` and the text give the reason."""

    def __init__(self, why: UnsentReason, text: str) -> None:
        super().__init__(text)
        self.why = why


Unsent = list[tuple[RedriveItem, UnsentReason, str]]


class RedriveTarget(Protocol):
    """Sends letters to topics or sinks."""

    def open(self) -> None:
        """Connect the clients that `send` needs."""

    def prepare(self, letter: Letter, partition: int, offset: int) -> RedriveItem:
        """Prepare a letter, without sending anything.

        Raises:
            NotSentError: This letter cannot be sent.
            TidemillError: No letter can be sent.
        """

    def send(self, items: Sequence[RedriveItem], positions: Positions) -> Unsent:
        """Send letters and save the cursor; return the letters that were refused.

        Raises:
            TidemillError: The redrive ends here; the next one continues after the last saved cursor.
        """

    def close(self) -> None:
        """Disconnect; unconfirmed letters are given up."""
