"""What the REST API says about dead letters; the pages show the same."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tidemill.deadletters.letter import Letter as StoredLetter
from tidemill.deadletters.letter import LetterSource
from tidemill.deadletters.payloads import Blob
from tidemill.deadletters.reader import Found, show_bytes


class Source(BaseModel):
    """A message that a letter is about; keys and values are text where they are UTF-8, else base64."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str | None
    headers: list[tuple[str, str | None]]
    headers_error: str | None = Field(None, description="Why its headers cannot be read; null where they can.")


class Letter(BaseModel):
    """A dead letter, without messages and payloads."""

    letter_id: str
    written_at: float = Field(description="Seconds since the epoch.")
    kind: str = Field(description="What went wrong.")
    error: str
    sink: str = Field(description="The sink that refused the payloads; '' if none did.")
    task_id: str | None
    attempts: int
    redrives: int = Field(description="How often its message was dead-lettered and sent again before.")
    place: str = Field(description="Where the letter is.")
    at: str = Field(description="The same as partition:offset, or file:row.")
    messages: list[str] = Field(description="topic:partition:offset of the messages that it is about.")
    key: str | None = Field(description="The key of the first one.")


class WholeLetter(Letter):
    """A dead letter with everything in it."""

    args: list[str]
    exit_code: int | None
    stderr: str
    payloads: list[str]
    sources: list[Source]
    sources_dropped: int


class LetterPage(BaseModel):
    """The newest letters that match."""

    rows: list[Letter]
    cursor: str | None = Field(description="For what comes next; null at the end.")
    others: int = Field(description="How many records were met that are not letters.")
    is_whole: bool = Field(description="Whether everything was searched; otherwise go on with the cursor.")
    searched: int = Field(description="How many records were searched, pages before included.")
    total: int = Field(description="How many there are.")
    place: str


def describe_letter(found: Found, letter: StoredLetter) -> Letter:
    """Return a letter without messages and payloads."""
    return Letter(**_describe(found, letter))


def describe_whole(found: Found, letter: StoredLetter) -> WholeLetter:
    """Return a letter with everything in it."""
    return WholeLetter(
        **_describe(found, letter),
        args=letter.args,
        exit_code=letter.exit_code,
        stderr=letter.stderr,
        payloads=letter.original_payloads,
        sources=[_describe_source(source) for source in letter.sources],
        sources_dropped=letter.sources_dropped,
    )


def _describe(found: Found, letter: StoredLetter) -> dict[str, Any]:
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
        "place": where,
        "at": f"{found.partition}:{found.offset}",
        "messages": [f"{source.topic}:{source.partition}:{source.offset}" for source in letter.sources],
        "key": _show(letter.sources[0].key) if letter.sources else None,
    }


def _describe_source(source: LetterSource) -> Source:
    return Source(
        topic=source.topic,
        partition=source.partition,
        offset=source.offset,
        key=_show(source.key),
        value=_show(source.value),
        headers=[(name, _show(value)) for name, value in source.headers],
        headers_error=source.headers_error,
    )


def _show(value: str | Blob | None) -> str | None:
    """Return a text, also where nothing but the size of bytes is left."""
    if isinstance(value, Blob) and value.dropped:
        return f"({value.length:,} bytes were dropped)" if value.length is not None else "(dropped)"
    return show_bytes(value)
