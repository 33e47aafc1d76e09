"""Models of the REST API for dead letters; the pages show the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from tidemill.deadletters.letter import LetterSource
from tidemill.deadletters.payloads import Blob
from tidemill.deadletters.reader import FoundLetter, show_bytes
from tidemill.deadletters.redrive.history import Redriven
from tidemill.deadletters.suggestions import suggest_commands
from tidemill.web.values.shown_bytes import mask_text


class RedrivenView(BaseModel):
    """A redrive of a letter."""

    at: float
    to: str = Field(description="source, sink, or a topic.")


class LetterSourceView(BaseModel):
    """A message that a letter is about. Keys and values are text if they are UTF-8, otherwise base64.

    Secrets are masked where their keys or their form reveal them.
    """

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str | None
    value_encoding: Literal["text", "base64"] = Field("text", description="The encoding of the value.")
    headers: list[tuple[str, str | None]]
    headers_error: str | None = Field(None, description="Why the headers cannot be read; null if they can.")


class LetterView(BaseModel):
    """A dead letter, without messages and payloads."""

    letter_id: str
    written_at: float = Field(description="Seconds since the epoch.")
    kind: str = Field(description="The kind of failure.")
    error: str
    sink: str = Field(description="The sink that rejected the payloads; '' if none did.")
    task_id: str | None
    attempts: int
    redrives: int = Field(description="How many times the message had been redriven before.")
    redriven: list[RedrivenView] | None = Field(
        description="Redrives of this letter, oldest first; null: the history cannot be read."
    )
    location: str = Field(description="Where the letter is stored.")
    at: str = Field(description="The same position as partition:offset, or file:row.")
    messages: list[str] = Field(description="The messages it is about, as topic:partition:offset.")
    key: str | None = Field(description="The key of the first message.")


class WholeLetter(LetterView):
    """A dead letter with all its contents."""

    args: list[str]
    exit_code: int | None
    stderr: str
    payloads: list[str] = Field(description="Payloads as JSON, with secrets masked.")
    sources: list[LetterSourceView]
    sources_dropped: int
    commands: dict[str, str] = Field(description="Commands that redrive the letter, by their effect.")


class LetterPage(BaseModel):
    """The newest letters that match."""

    rows: list[LetterView]
    cursor: str | None = Field(description="The cursor of the next page; null at the end.")
    others: int = Field(description="How many records are not dead letters.")
    is_whole: bool = Field(description="Whether the search is complete; otherwise continue with the cursor.")
    searched: int = Field(description="How many records were searched, including earlier pages.")
    total: int = Field(description="How many records there are.")
    location: str


def describe_letter(found: FoundLetter, redriven: Sequence[Redriven] | None) -> LetterView:
    """Return a letter without messages and payloads."""
    return LetterView(**_describe(found, redriven))


def describe_whole(
    found: FoundLetter, redriven: Sequence[Redriven] | None, max_redrives: int, config: str = ""
) -> WholeLetter:
    """Return a letter with all its contents.

    Args:
        found: The letter.
        redriven: Its redrives; None if the history cannot be read.
        max_redrives: How often a message is redriven unless a command says otherwise.
        config: The configuration file in the commands; empty for none.
    """
    letter = found.letter
    assert letter is not None
    return WholeLetter(
        **_describe(found, redriven),
        args=letter.args,
        exit_code=letter.exit_code,
        stderr=letter.stderr,
        payloads=[mask_text(payload) for payload in letter.original_payloads],
        sources=[_describe_source(source) for source in letter.sources],
        sources_dropped=letter.sources_dropped,
        commands=suggest_commands(letter, config, again=bool(redriven), max_redrives=max_redrives),
    )


def _describe(found: FoundLetter, redriven: Sequence[Redriven] | None) -> dict[str, Any]:
    letter = found.letter
    assert letter is not None
    where = (
        f"row {found.offset} of {found.file}" if found.file else f"partition {found.partition}, offset {found.offset}"
    )
    return {
        "letter_id": letter.letter_id,
        "written_at": letter.written_at,
        "kind": letter.kind.value,
        "error": letter.error,
        "sink": f"{letter.sink_type}.{letter.sink_name}" if letter.sink_name else "",
        "task_id": letter.task_id,
        "attempts": letter.attempt_count,
        "redrives": letter.redrives,
        "redriven": None if redriven is None else [RedrivenView(at=each.at, to=each.to) for each in redriven],
        "location": where,
        "at": f"{found.partition}:{found.offset}",
        "messages": [f"{source.topic}:{source.partition}:{source.offset}" for source in letter.sources],
        "key": _show(letter.sources[0].key) if letter.sources else None,
    }


def _describe_source(source: LetterSource) -> LetterSourceView:
    return LetterSourceView(
        topic=source.topic,
        partition=source.partition,
        offset=source.offset,
        key=_show(source.key),
        value=_show(source.value),
        value_encoding="base64" if isinstance(source.value, Blob) and source.value.base64 is not None else "text",
        headers=[(name, _show(value, name)) for name, value in source.headers],
        headers_error=source.headers_error,
    )


def _show(value: str | Blob | None, name: str = "") -> str | None:
    """Return bytes as text; for dropped bytes, return only their size."""
    if isinstance(value, Blob) and value.dropped:
        return f"({value.length:,} bytes were dropped)" if value.length is not None else "(dropped)"
    text = show_bytes(value)
    return None if text is None else mask_text(text, name)
