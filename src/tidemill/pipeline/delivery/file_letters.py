"""The dead letters of a bounded engine as files: one for each part, published right before the part's outcomes.

A part of a bounded run counts only once its outcome file exists, and its letters file is published before that. So a
letter is confirmed as soon as it is accepted here: if it is lost with its engine, its messages are reprocessed.

Invariants: every accepted letter is in the published file, unless all its messages are left to another run. Memory
holds up to `GROUP_BYTES` of letters plus those that arrive during one write; beyond that, letters are confirmed only
after they are written. The event loop never waits for the disk. A failed write ends the run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tidemill.core.errors import RemoteError, describe_error
from tidemill.core.wording import format_count
from tidemill.deadletters.files import LetterFile, LetterRow, LettersTarget, check_letters_folder, make_row
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import LetterStatistics
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sources.base import TopicPartition

#: Letters are written when this many, or this many bytes of them, are waiting. A written group is read as one.
GROUP_LETTERS = 1_000
GROUP_BYTES = 8 * 1024 * 1024
#: Writes that take longer than this are reported as stalled.
SLOW_WRITE_SECONDS = 1.0


class FileDeadLetters:
    """The `DeadLetters` of a bounded engine.

    Args:
        target: The location of the files.
        engine_id: The engine's id.
        partitions: One file for each of these; empty: one file for all.
    """

    def __init__(self, target: LettersTarget, engine_id: str, partitions: Iterable[TopicPartition] = ()) -> None:
        self._path = target.path
        keys: list[TopicPartition | None] = [*partitions] or [None]
        self._files = {key: LetterFile(target, number, engine_id) for number, key in enumerate(keys)}
        self._first = keys[0]
        self._rows: dict[TopicPartition | None, list[LetterRow]] = {}
        self._count = self._bytes = 0
        # A shutdown does not wait for a slow disk, so the thread of an abandoned write may still be running.
        self._disk = threading.Lock()
        # Held only briefly, because the loop takes it too.
        self._taking = threading.Lock()
        self._held: list[tuple[str, Callable[[], None]]] = []
        self._since = 0.0
        self._writing: asyncio.Task[None] | None = None
        #: Runs its writes; an engine sets its own.
        self.tasks = EngineTasks()
        #: Called with the error when a write fails.
        self.on_error: Callable[[str], None] = _ignore
        #: The error of a failed write; None: no write has failed.
        self.error: str | None = None
        #: The names of the published files.
        self.published: list[str] = []
        self._written = 0
        self._kinds: Counter[str] = Counter()

    async def open(self) -> None:
        """Make sure that letters can be written.

        Raises:
            ConfigError: The folder is not writable.
        """
        await asyncio.to_thread(check_letters_folder, Path(self._path))

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Accept a letter; see `DeadLetters.put`."""
        row = make_row(letter)
        first = letter.sources[0] if letter.sources else None
        key = (first.topic, first.partition) if first is not None else None
        with self._taking:
            self._rows.setdefault(key if key in self._files else self._first, []).append(row)
        self._count += 1
        self._bytes += len(row[-1])
        if self._bytes <= 2 * GROUP_BYTES:
            asyncio.get_running_loop().call_soon(self._confirm, letter.kind.value, done)
        else:
            self._held.append((letter.kind.value, done))
        if self._due and self._writing is None and self.error is None:
            self._writing = self.tasks.run("the dead letters", self._write())

    @property
    def _due(self) -> bool:
        return self._count >= GROUP_LETTERS or self._bytes >= GROUP_BYTES

    def _confirm(self, kind: str, done: Callable[[], None]) -> None:
        if self.error is None:
            self._written += 1
            self._kinds[kind] += 1
            done()

    async def _write(self) -> None:
        try:
            while self._due:
                waiting = len(self._held)
                self._since = time.monotonic()
                count, size = await asyncio.to_thread(self._write_rows)
                self._count -= count
                self._bytes -= size
                held, self._held = self._held[:waiting], self._held[waiting:]
                for kind, done in held:
                    self._confirm(kind, done)
        except Exception:  # stored in `error`
            self.on_error(self.error or "")
        finally:
            self._writing = None

    def _write_rows(self) -> tuple[int, int]:
        """Write all waiting letters; return how many letters and bytes were written."""
        with self._disk:
            with self._taking:
                rows, self._rows = self._rows, {}
            count = size = 0
            try:
                for key, part in rows.items():
                    for group in _split(part):
                        self._files[key].write(group)
                        count += len(group)
                        size += sum(len(row[-1]) for row in group)
            except Exception as error:
                # Store the error here: after a shutdown, nothing may be waiting for this thread.
                self._note_error(error)
                raise
            return count, size

    def _note_error(self, error: Exception) -> None:
        self.error = f"RemoteError: dead letters cannot be written to {self._path}: {describe_error(error)}"

    def statistics(self) -> LetterStatistics:
        """Return how many letters were confirmed; none is ever dropped."""
        return LetterStatistics(self._written, self._kinds)

    def describe_wait(self) -> str | None:
        """Return how many letters are waiting for the disk, and for how long; None: no letter waits."""
        seconds = time.monotonic() - self._since
        if not self._held or seconds < SLOW_WRITE_SECONDS:
            return None
        return f"{format_count(len(self._held), 'letter')} waiting for {seconds:.0f} s to be written to {self._path}"

    async def close(self) -> None:
        """Confirm no more letters; `publish` writes the waiting ones with the outcomes."""
        self._held = []

    def publish(self, outcome: str, partition: TopicPartition | None = None, below: int | None = None) -> str:
        """Publish the letters of a part under their final name; blocking.

        Args:
            outcome: The outcome file that is published next.
            partition: The partition of the letters; None if one file serves all.
            below: The offset that the outcomes end before; None: they cover everything.

        Returns:
            The name; '' if there are no letters.

        Raises:
            RemoteError: Letters of this engine were not written.
        """
        self._write_rows()
        if self.error is not None:
            raise RemoteError(self.error)
        try:
            with self._disk:
                name = self._files[partition].publish(outcome, below)
        except Exception as error:
            self._note_error(error)
            raise
        if name:
            self.published.append(name)
        return name

    def discard(self) -> None:
        """Remove unfinished files; blocking."""
        with self._disk:
            for file in self._files.values():
                file.discard()


def _split(rows: Sequence[LetterRow]) -> Iterator[list[LetterRow]]:
    """Split rows into groups of up to `GROUP_BYTES`; a larger letter is a group by itself."""
    group: list[LetterRow] = []
    size = 0
    for row in rows:
        if group and size + len(row[-1]) > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row[-1])
    yield group


def _ignore(text: str) -> None:
    pass
