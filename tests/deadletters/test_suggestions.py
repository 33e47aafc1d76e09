"""The command that is suggested for a letter sends it."""

from __future__ import annotations

from tidemill.deadletters.letter import Letter, LetterKind, describe_sources
from tidemill.deadletters.suggestions import suggest_commands
from tidemill.runtime.kafka.source_message import SourceMessage


def test_a_message_whose_headers_cannot_be_read_is_sent_without_them() -> None:
    def suggest(headers_error: str | None) -> str:
        message = SourceMessage("t", 0, 1, headers_error=headers_error)
        letter = Letter(kind=LetterKind.PARSE, error="e", letter_id="a1", sources=describe_sources([message]))
        return suggest_commands(letter, "", again=False, max_redrives=3)["process again"]

    assert suggest(None) == "tidemill dlq redrive --id a1"
    assert suggest("the name of a header is not UTF-8") == "tidemill dlq redrive --id a1 --drop-headers"
