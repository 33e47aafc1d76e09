"""Collects messages as users see them: provokes each one, and makes it the same on every machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tidemill

#: A mistake, and what raises the message about it or returns it.
Mistake = tuple[str, Callable[[], Any]]

_PACKAGE = str(Path(tidemill.__file__).parent)
_PORT = re.compile(r"(127\.0\.0\.1|\[?::1\]?|localhost):(?!9092)\d{2,5}")
_PROCESS = re.compile(r"\bprocess \d+")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_SEARCH_PATH = re.compile(r"in PATH \([^)]*\)")
#: What a client says of a broker that is not there depends on how far it came.
_ANSWER = re.compile(r"(no answer from 127\.0\.0\.1:\w+:) [^;]*;")
_SITE = re.compile(r"/\S*/site-packages/")


class Collector:
    """The messages of one section.

    Args:
        folder: The folder in which mistakes are made; `.../` in the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[str] = []

    def add(self, mistake: str, text: str) -> None:
        """Add a message that is known."""
        lines = [line.rstrip() for line in self.normalise(text).strip("\n").splitlines()]
        self._parts.append("\n".join((*(f"# {line}" for line in self.normalise(mistake).splitlines()), *lines)))

    def provoke(self, mistakes: Iterable[Mistake]) -> None:
        """Make mistakes, and add what is said about each.

        Raises:
            AssertionError: Nothing was said.
        """
        silent = []
        for mistake, make in mistakes:
            try:
                said = make()
            except Exception as error:
                said = str(error)
            if isinstance(said, str) and said:
                self.add(mistake, said)
            else:
                silent.append(mistake)
        assert not silent, f"nothing was said of {silent}"

    def normalise(self, text: str) -> str:
        """Replace what differs from machine to machine."""
        text = text.replace(f"{self._folder}/", ".../").replace(str(self._folder), "...")
        text = text.replace(f"{_PACKAGE}/", "TIDEMILL/")
        text = _SITE.sub("PACKAGES/", text).replace(socket.gethostname(), "HOST")
        text = _SEARCH_PATH.sub("in PATH (...)", _ANSWER.sub(r"\1 ...;", text))
        return _ADDRESS.sub("0x...", _PROCESS.sub("process PID", _PORT.sub(r"\1:PORT", text)))

    @property
    def text(self) -> str:
        """The section as the file has it."""
        return "\n\n".join(self._parts)


def read_sections(path: Path) -> dict[str, str]:
    """Return the sections of the file by their titles."""
    sections: dict[str, str] = {}
    if not path.exists():
        return sections
    for part in re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        sections[title.removesuffix(" ===")] = text.strip("\n")
    return sections


def write_sections(path: Path, sections: dict[str, str]) -> None:
    """Write the file."""
    parts = (f"=== {title} ===\n\n{sections[title]}\n" for title in sorted(sections))
    path.write_text(
        "Messages as users see them, each after the mistake that it is about.\n"
        "Written by tests/messages/test_messages.py: TIDEMILL_WRITE_MESSAGES=1 pytest tests/messages rewrites it.\n\n"
        + "\n".join(parts),
        encoding="utf-8",
    )
