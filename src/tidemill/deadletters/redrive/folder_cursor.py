"""The cursor of a redrive over letters in files: a journal next to them.

Invariants: one process at a time holds a redrive's journal, by a lock that ends with the process. When `commit`
returns, its positions are on disk. After a crash, the journal has everything that was saved before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tidemill.core.deadletters.letter_files import JournalEntry, decode_journal, encode_journal
from tidemill.core.deadletters.redrive import REDRIVE_PREFIX
from tidemill.core.errors import ConfigError, FencedError, InvariantError, RemoteError
from tidemill.deadletters.folder_reader import FolderReader
from tidemill.deadletters.redrive.producer import Refusals, ResentRecord
from tidemill.runtime.files.lock import HeldError, lock_file

_PREFIX = "_redrive-"
_SUFFIX = ".jsonl"


def locate_journal(folder: Path, name: str) -> Path:
    """Return the path of a redrive's journal."""
    return folder / f"{_PREFIX}{name.removeprefix(REDRIVE_PREFIX)}{_SUFFIX}"


def read_journals(folder: Path) -> Iterator[dict[str, JournalEntry]]:
    """Yield the journal of each redrive; unreadable ones are skipped."""
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            yield decode_journal(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue


def read_journal(path: Path) -> dict[str, JournalEntry]:
    """Return the journal of a redrive; empty if it never ran.

    Raises:
        ConfigError: The journal cannot be read, so it is unknown which letters were sent.
    """
    try:
        return decode_journal(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"dlq redrive: its cursor {path} cannot be read ({text}), so it is unknown which letters were sent; "
            "restore the file, or remove it to begin with the oldest letter"
        ) from None


class FolderCursor:
    """A redrive's journal, for writing; blocking.

    Args:
        letters: The folder of letters.
        name: The redrive's name.
        note: Returns the note that is saved with a position, by file number and position.
    """

    def __init__(self, letters: FolderReader, name: str, note: Callable[[int, int], str]) -> None:
        self._path = locate_journal(letters.path, name)
        self._name = name
        self._letters = letters
        self._note = note
        self._lock: int | None = None
        self._fd: int | None = None

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, str]]:
        """Return the journal's entries for the existing files; see `RedriveCursor.read`."""
        saved = read_journal(self._path)
        found = {}
        for number, (_, rows) in ranges.items():
            name, mark = self._letters.identify(number)
            entry = saved.get(name)
            if entry is not None and entry.mark == mark:
                found[number] = (min(entry.position, rows), entry.note)
        return found

    def open(self) -> None:
        """Lock the redrive, and prepare its journal.

        Raises:
            ConfigError: The journal cannot be read, or the folder is not writable.
            FencedError: Another process runs the same redrive.
        """
        try:
            self._lock = lock_file(self._path.with_suffix(".lock"))
            # Rewritten with one line per file, and without a line that a crash tore.
            unfinished = self._path.with_suffix(".new")
            with open(unfinished, "w", encoding="utf-8") as file:
                file.write(encode_journal(read_journal(self._path).values()))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path)
            _sync_folder(self._path.parent)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except HeldError as error:
            raise FencedError(
                f"dlq redrive: process {error.holder}, on this host or another that shares the folder, is running the "
                f"same redrive ({self._name}); wait for it to end"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"dlq redrive: its cursor cannot be saved next to the letters, in {self._path.parent}: "
                f"{error.strerror}; nothing was sent; let this user write to that folder"
            ) from None

    def commit(self, records: Sequence[ResentRecord], positions: Mapping[int, int]) -> Refusals:
        """Save positions; nothing is sent here.

        Raises:
            RemoteError: The disk refuses the write; the next run sends again what was sent since the last save.
        """
        if records or self._fd is None:
            raise InvariantError("a cursor in a file sends nothing, and saves nothing before it is open")
        entries = [
            JournalEntry(*self._letters.identify(number), at, self._note(number, at))
            for number, at in positions.items()
        ]
        data = encode_journal(entries).encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise RemoteError(
                f"dlq redrive: its cursor {self._path} cannot be written: {error.strerror}; run the same "
                "command again to continue from the last save"
            ) from None
        return {}

    def close(self) -> None:
        """Close the journal, and release its lock."""
        for fd in (self._fd, self._lock):
            if fd is not None:
                os.close(fd)
        self._fd = self._lock = None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
