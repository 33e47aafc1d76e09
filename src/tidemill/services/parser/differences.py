"""Compares the files of a folder with what the parsers of other hosts have read.

Invariants: a difference counts once two looks have found it, against the same stored content; so hosts whose files are
replaced at about the same time do not differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from tidemill.dags.loading import digest_files
from tidemill.services.parser.files import Signature, sign_files
from tidemill.store.calls.service_calls import FileRecord


class FolderDifferences:
    """The differences between a folder and the files that other parsers have stored.

    Args:
        folder: The folder.

    Attributes:
        unsure: Whether the last look has found differences that do not count yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[str, tuple[tuple[str, ...], Signature, str]] = {}
        self._seen: dict[str, tuple[str, str]] = {}
        self.unsure = False

    def look(self, others: Iterable[FileRecord], found: Collection[str]) -> dict[str, str]:
        """Return the files that differ, each with `missing` or `differs`.

        Args:
            others: The files that other parsers have stored.
            found: The files of this folder.
        """
        present = set(found)
        before, self._seen = self._seen, {}
        digests, self._digests = self._digests, {}
        for file in others:
            if file.path not in present and not (self._folder / file.path).exists():
                self._seen[file.path] = "missing", file.digest
            elif self._digest(file, digests) != file.digest:
                self._seen[file.path] = "differs", file.digest
        self.unsure = any(before.get(path) != one for path, one in self._seen.items())
        return {path: one[0] for path, one in self._seen.items() if before.get(path) == one}

    def _digest(self, file: FileRecord, known: dict[str, tuple[tuple[str, ...], Signature, str]]) -> str:
        """Return the hash of the same files in this folder; they are read again only if they have changed."""
        names = tuple(sorted(file.modules)) or (file.path,)
        signature = sign_files(self._folder, names)
        one = known.get(file.path)
        if one is None or one[:2] != (names, signature):
            one = names, signature, digest_files(self._folder, list(names))
        self._digests[file.path] = one
        return one[2]
