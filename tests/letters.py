"""Folders of dead letters for tests, as bounded runs leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.deadletters.files import LetterFile, LettersTarget, make_row
from tidemill.deadletters.letter import Letter, LetterKind, describe_sources
from tidemill.runtime.kafka.source_message import SourceMessage


def letter(offset: int, **fields: Any) -> Letter:
    """Return a letter about a message."""
    message = SourceMessage(fields.pop("topic", "orders"), 0, offset, b"key-%d" % (offset % 3), b"value-%d" % offset)
    given: dict[str, Any] = {"kind": LetterKind.TASK, "error": "exit code 1", "sources": describe_sources([message])}
    return Letter(**{**given, **fields})


def write(folder: Path, *groups: list[Letter], run: str = "r1", part: str = "part-0.parquet") -> Path:
    """Write a file with a row group for each list, of a run whose outcomes were removed since."""
    place = LettersTarget(str(folder), run, str(folder / "gone"), "id")
    file = LetterFile(place, 0, f"engine-of-{run}-{part}")
    for letters in groups:
        file.write([make_row(each) for each in letters])
    return folder / file.publish(part)
