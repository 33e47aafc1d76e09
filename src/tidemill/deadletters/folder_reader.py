"""Reads dead letters from files, as `reader` does from a topic: a file is a partition, and a row is an offset.

Invariants: memory grows with the folder by only a few numbers per file. A file that does not contain letters is
reported at its position and does not stop the reading. Files that do not count (`core.deadletters.letter_files`) and
files added after the folder was listed are skipped. All calls block, so do not make them on event loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.core.deadletters.letter_files import is_valid
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.wording import format_count
from tidemill.deadletters.files import METADATA_KEY, FileOrigin, read_letters_name, read_outcomes_id
from tidemill.deadletters.reader import FoundLetter, Reached, decode_found

#: The mark of an unreadable file; once the file becomes readable, it counts as another one.
_UNREADABLE = "unreadable"


class _File(msgspec.Struct):
    """A file with letters, or one that should have some.

    Attributes:
        name: The file's name.
        mark: Distinguishes the file from another one of the same name.
        rows: The number of rows; 1 if the file cannot be read.
        groups: For each row group its first row and the time of its last letter, in seconds since the epoch.
        began: The time of the first letter, in seconds since the epoch.
        problem: Why the file cannot be read.
    """

    name: str
    mark: str
    rows: int
    groups: list[tuple[int, float]] = []
    began: float = 0.0
    problem: str = ""


class FolderReader:
    """The letters of a folder, for reading; use it in a `with` block.

    Args:
        path: The folder.

    Attributes:
        path: The absolute path of the folder.
        location: The folder, as messages name it.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self.location = f"folder {str(self.path)!r}"
        self._known: list[_File] | None = None
        self._outcomes_ids: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No file stays open, so there is nothing to close."""

    def find_ranges(self) -> dict[int, tuple[int, int]]:
        """Return the row range of each file, by its number; see `LetterReader.find_ranges`."""
        return {number: (0, file.rows) for number, file in enumerate(self._list_files())}

    def _list_files(self) -> list[_File]:
        if self._known is None:
            try:
                names = sorted(entry.name for entry in self.path.iterdir() if entry.is_file())
            except (FileNotFoundError, NotADirectoryError):
                raise ConfigError(
                    f"dlq.path: the folder {str(self.path)!r} does not exist: no bounded run has written to it yet, or "
                    "dlq.path is wrong"
                ) from None
            except OSError as error:
                raise RemoteError(f"dlq.path: {self.path} cannot be read: {error.strerror}") from None
            found = [self._inspect(name) for name in names if not name.startswith(("_", "."))]
            self._known = sorted((each for each in found if each is not None), key=lambda each: each.began)
        return self._known

    def _inspect(self, name: str) -> _File | None:
        """Return the metadata of a file; None if the file does not count."""
        try:
            metadata = pq.read_metadata(self.path / name)
            origin = msgspec.json.decode((metadata.metadata or {})[METADATA_KEY], type=FileOrigin)
            groups, row, began = [], 0, 0.0
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                column = next(group.column(n) for n in range(group.num_columns) if _is_time(group.column(n)))
                groups.append((row, column.statistics.max.timestamp()))
                began = began or column.statistics.min.timestamp()
                row += group.num_rows
        except FileNotFoundError:
            return None
        except OSError as error:
            return _File(name, _UNREADABLE, 1, problem=f"{name} cannot be read: {error.strerror or error}")
        except (pa.ArrowException, msgspec.MsgspecError, KeyError, StopIteration, AttributeError):
            return _File(name, _UNREADABLE, 1, problem=f"{name} is not a file of dead letters, or is damaged")
        if not self._is_counted(name, origin):
            return None
        return _File(name, origin.engine_id, metadata.num_rows, groups, began)

    def _is_counted(self, name: str, origin: FileOrigin) -> bool:
        folder = Path(origin.outcomes)
        if origin.outcomes not in self._outcomes_ids:
            self._outcomes_ids[origin.outcomes] = read_outcomes_id(folder)
        there = self._outcomes_ids[origin.outcomes]
        try:
            named = read_letters_name(folder / origin.outcome) if there == origin.outcomes_id else None
        except (OSError, pa.ArrowException):
            return True  # it may count: showing a letter twice is better than never
        return is_valid(name, origin.outcomes_id, there, named)

    def find_offsets_at(self, seconds: float, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Return where to start so that every letter written at a time or later is found; see
        `LetterReader.find_offsets_at`.
        """
        return {
            number: next((row for row, newest in file.groups if newest >= seconds), 0 if file.problem else file.rows)
            for number, file in enumerate(self._list_files())
            if number in ranges
        }

    def identify(self, number: int) -> tuple[str, str]:
        """Return the name of a file, and the mark that distinguishes it from another file of the same name."""
        file = self._list_files()[number]
        return file.name, file.mark

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[FoundLetter | Reached | None]:
        """Yield the letters of each file in turn, the oldest file first; see `LetterReader.stream`."""
        files = self._list_files()
        for number in sorted(ends):
            start, end = starts.get(number, 0), ends[number]
            if start < end:
                yield from self._read_file(number, files[number], start, end)
            yield Reached(number, end)

    def _read_file(self, number: int, file: _File, start: int, end: int) -> Iterator[FoundLetter]:
        if file.problem:
            yield FoundLetter(number, 0, None, file.problem, file=file.name)
            return
        try:
            with pq.ParquetFile(self.path / file.name) as opened:
                for index, (first, _) in enumerate(file.groups):
                    after = first + opened.metadata.row_group(index).num_rows
                    if after > start and first < end:
                        yield from self._read_group(opened, index, number, file.name, range(first, after), start, end)
        except OSError as error:
            raise RemoteError(
                f"dlq: {self.path / file.name} is no longer readable: {error.strerror or error}"
            ) from None

    @staticmethod
    def _read_group(
        opened: pq.ParquetFile, index: int, number: int, name: str, rows: range, start: int, end: int
    ) -> Iterator[FoundLetter]:
        try:
            letters = opened.read_row_group(index, columns=["letter"]).column(0).cast(pa.binary())
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            # Arrow sets no error number for damaged bytes.
            text = f"damaged: {format_count(len(rows), 'row')} of {name}: {' '.join(str(error).split())}"
            yield FoundLetter(number, max(start, rows.start), None, text, file=name)
            return
        for row, value in zip(rows, letters, strict=True):
            if start <= row < end:
                yield decode_found(FoundLetter(number, row, None, file=name), value.as_py())


def _is_time(column: Any) -> bool:
    return bool(column.path_in_schema == "written_at")
