"""Dead letters as Parquet files: their schema, how a file is written, and its metadata.

Each row is a letter as JSON, with columns that Spark SQL can filter by. Invariants: a file is complete if its name has
no leading `_`. Its metadata names the run that wrote it, and the outcome file and folder that it belongs to. A file
never changes after it got its name. Everything here blocks; pyarrow is loaded with the first letter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.deadletters.letter_files import (
    build_run_pattern,
    build_unfinished_pattern,
    name_letters_file,
    name_unfinished_file,
)
from tidemill.core.errors import ConfigError, escape_surrogates
from tidemill.deadletters.letter import Letter, encode_letter

#: Under this key, a letters file stores its origin, and an outcome file the name of its letters file.
METADATA_KEY = b"tidemill.letters"
#: How much of an error the column `error` holds; the letter has all of it.
ERROR_CHARS = 4096
#: The file with the id of a folder of outcomes, in that folder.
_ID_FILE = "_id"
_ID = re.compile(r"[0-9a-f]{8,64}")

#: letter_id, kind, error, topic, partition, offset, written_at, letter.
LetterRow = tuple[str, str, str, str | None, int | None, int | None, datetime, bytes]


class LettersTarget(msgspec.Struct, frozen=True):
    """The folder and the files for the letters of a run.

    Attributes:
        path: The folder for letters.
        run: The id of the run.
        outcomes: The folder of the outcomes.
        outcomes_id: The id of that folder.
    """

    path: str
    run: str
    outcomes: str
    outcomes_id: str


class FileOrigin(msgspec.Struct, frozen=True):
    """The origin of a letters file, in its metadata.

    Attributes:
        run: The id of the run that wrote the file.
        outcomes: The folder of the outcomes.
        outcomes_id: The id of that folder at the time of writing.
        outcome: The name of the outcome file that this file belongs to.
        engine_id: The engine that wrote the file; no other engine wrote a file with the same rows.
    """

    run: str
    outcomes: str
    outcomes_id: str
    outcome: str
    engine_id: str


def make_row(letter: Letter) -> LetterRow:
    """Return a letter as a row with the topic, partition and offset of its first message."""
    first = min(letter.sources, key=lambda source: source.offset, default=None)
    target = (first.topic, first.partition, first.offset) if first is not None else (None, None, None)
    written_at = datetime.fromisoformat(letter.timestamp).astimezone(UTC)
    error = escape_surrogates(letter.error[:ERROR_CHARS])
    return (letter.letter_id, letter.kind.value, error, *target, written_at, encode_letter(letter))


@functools.cache
def _build_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("letter_id", pa.string(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("error", pa.string(), nullable=False),
            pa.field("topic", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("written_at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("letter", pa.string(), nullable=False),
        ]
    )


class LetterFile:
    """A file that is being written.

    Args:
        target: The folder, and the outcomes that the letters belong to.
        part: The file's number among the files of this engine.
        engine_id: The engine that writes the file.
    """

    def __init__(self, target: LettersTarget, part: int, engine_id: str) -> None:
        self._target = target
        self._engine_id = engine_id
        self._folder = Path(target.path)
        self._path = self._folder / name_unfinished_file(target.outcomes_id, engine_id, part)
        self._writer: Any = None
        self._last_offset = -1

    def write(self, rows: Sequence[LetterRow]) -> None:
        """Append a row group."""
        import pyarrow as pa

        schema = _build_schema()
        arrays = [
            pa.array(column, type=field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
        ]
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = _make_writer(self._path)
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        self._last_offset = max([self._last_offset, *(row[5] for row in rows if row[5] is not None)])

    def publish(self, outcome: str, below: int | None = None) -> str:
        """Complete the file under its name; a file from an earlier attempt at the part is replaced or removed.

        Args:
            outcome: The name of the outcome file that is about to be published.
            below: Leave out letters whose messages are all at this offset or above; None includes every letter.

        Returns:
            The file's name; '' if there are no letters, and so no file.
        """
        name = name_letters_file(self._target.run, outcome)
        final = self._folder / name
        if self._writer is not None and below is not None and self._last_offset >= below:
            self._keep(below)
        if self._writer is None:
            final.unlink(missing_ok=True)
            return ""
        target = self._target
        origin = FileOrigin(target.run, target.outcomes, target.outcomes_id, outcome, self._engine_id)
        self._writer.add_key_value_metadata({METADATA_KEY: msgspec.json.encode(origin)})
        self._close()
        self._path.replace(final)
        return name

    def _keep(self, below: int) -> None:
        """Rewrite the file, row group by row group, without letters about messages that are left to another run."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self._close()
        whole = self._path.with_name(f"{self._path.name}-whole")
        self._path.replace(whole)
        try:
            with pq.ParquetFile(whole) as file:
                for group in range(file.num_row_groups):
                    offsets = (table := file.read_row_group(group)).column("offset")
                    table = table.filter(pc.fill_null(pc.less(offsets, below), True))
                    if table.num_rows:
                        self._writer = self._writer or _make_writer(self._path)
                        self._writer.write_table(table)
        finally:
            whole.unlink()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        writer.close()

    def discard(self) -> None:
        """Remove the file if it is unfinished; errors are ignored."""
        with contextlib.suppress(Exception):  # pyarrow raises several kinds for a file that it cannot complete
            if self._writer is not None:
                self._close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _make_writer(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(path, _build_schema(), compression="zstd")


def check_letters_folder(path: Path) -> None:
    """Create a folder for letters if it is missing, and check that it is writable.

    Raises:
        ConfigError: The folder cannot be created or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Only an attempt shows this: read-only file systems and full disks have writable modes.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"dlq.path: dead letters cannot be written to {path}: {error.strerror}; change its permissions, or set "
            "another folder"
        ) from None


def read_outcomes_id(folder: Path) -> str | None:
    """Return the id of a folder of outcomes; None if the folder does not exist or has no id."""
    try:
        text = (folder / _ID_FILE).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if _ID.fullmatch(text) else None


def ensure_outcomes_id(folder: Path, proposed: str) -> str:
    """Return the id of a folder of outcomes; a folder without an id gets the proposed one."""
    found = read_outcomes_id(folder)
    if found is None:
        unfinished = folder / f"{_ID_FILE}.new"
        with open(unfinished, "w", encoding="ascii") as file:
            file.write(proposed)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / _ID_FILE)
    return found or proposed


def read_letters_name(outcome: Path) -> str | None:
    """Return the letters file that an outcome file names, '' if it names none; None if the outcome file does not exist.

    Raises:
        OSError: The outcome file cannot be read.
    """
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(outcome).metadata or {}
    except FileNotFoundError:
        return None
    return str(metadata.get(METADATA_KEY, b"").decode("utf-8", "replace"))


def remove_unfinished(path: str, outcomes_id: str) -> None:
    """Remove unfinished files of killed engines; no engine may be working for the outcomes folder."""
    for leftover in Path(path).glob(build_unfinished_pattern(outcomes_id)):
        leftover.unlink(missing_ok=True)


def remove_run(path: str, run: str) -> None:
    """Remove the letters of a run whose messages are all about to be reprocessed."""
    for letters in Path(path).glob(build_run_pattern(run)):
        letters.unlink(missing_ok=True)
