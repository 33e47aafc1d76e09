"""Dead letters in files: the names of the files, their validity, and the journal of a redrive.

Theory of operation. A part of a bounded run writes its letters to one file, which is renamed just before the part's
outcome file; the outcome file names the letters file. A crash in between leaves a letters file that no outcome names.
Such a file is not valid: the part is processed again and writes its letters again. If the outcomes have been removed
since (their folder was deleted, or a later run created another one of the same name), nothing will be reprocessed
because of them, so the file is valid.

A redrive keeps a journal: one line per file and save; the last line of a file is its state. Appending costs the same
however many files there are. A crash can only truncate the last line, which then has no line feed and is skipped.

Invariants: a name belongs to one run and one part, so a retried part replaces its own file and no other; a journal that
cannot be parsed is an error and never counts as empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

_PREFIX = "letters-"
_VERSION = 1


def name_letters_file(run: str, outcome: str) -> str:
    """Return the name of the letters file that belongs to an outcome file.

    Args:
        run: The id of the run.
        outcome: The name of the outcome file.

    Example:
        >>> name_letters_file("0f3a", "part-00001.parquet")
        'letters-0f3a-part-00001.parquet'
    """
    return f"{_PREFIX}{run}-{outcome}"


def build_run_pattern(run: str) -> str:
    """Return the glob pattern for all letters files of a run."""
    return f"{_PREFIX}{run}-*"


def name_unfinished_file(outcomes_id: str, engine_id: str, part: int) -> str:
    """Return the name of a letters file before it is complete.

    Args:
        outcomes_id: The id of the outcomes folder it is written for.
        engine_id: The id of the engine that writes it.
        part: The number of the file among those of the engine.
    """
    return f"_{_PREFIX}{outcomes_id}-{engine_id}-{part:05d}"


def build_unfinished_pattern(outcomes_id: str) -> str:
    """Return the glob pattern for all unfinished letters files of an outcomes folder."""
    return f"_{_PREFIX}{outcomes_id}-*"


def is_valid(name: str, written_for: str, outcomes_id: str | None, named: str | None) -> bool:
    """Return whether the letters in a file may be shown and sent.

    Args:
        name: The file's name.
        written_for: The id of the outcomes folder that it was written for.
        outcomes_id: The id of the outcomes folder that exists now; None if there is none.
        named: The letters file that its outcome file names; None if there is no outcome file.

    Example:
        >>> is_valid("letters-a", "x", "x", None), is_valid("letters-a", "x", None, None)
        (False, True)
    """
    return outcomes_id != written_for or named == name


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """The progress of a redrive in one file.

    Attributes:
        file: The file's name.
        mark: Distinguishes the file from others of the same name.
        position: The first row that is not processed.
        note: The `RedriveRecord` of the file, encoded.
    """

    file: str
    mark: str
    position: int
    note: str


def encode_journal(entries: Iterable[JournalEntry]) -> str:
    """Return entries as the lines of a journal."""
    return "".join(
        json.dumps(
            {"tidemill": _VERSION, "file": each.file, "mark": each.mark, "position": each.position, "note": each.note},
            separators=(",", ":"),
        )
        + "\n"
        for each in entries
    )


def decode_journal(text: str) -> dict[str, JournalEntry]:
    """Return the last entry of each file.

    Raises:
        ValueError: A line is not a journal entry; the message gives its number.

    Example:
        >>> decode_journal(encode_journal([JournalEntry("a", "m", 3, "")]) + '{"torn')
        {'a': JournalEntry(file='a', mark='m', position=3, note='')}
    """
    *lines, _torn = text.split("\n")
    found: dict[str, JournalEntry] = {}
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            known = content["tidemill"] == _VERSION
            entry = JournalEntry(
                str(content["file"]), str(content["mark"]), max(0, int(content["position"])), str(content["note"])
            )
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise ValueError(f"line {number} is not an entry of a redrive journal")
        found[entry.file] = entry
    return found
