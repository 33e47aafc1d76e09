"""Reads a Dockerfile: its stages, and their instructions with continued lines joined."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One stage: its base image, its name, and its instructions in order."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, word: str) -> list[str]:
        """Return the arguments of each instruction of a kind."""
        return [rest for name, rest in self.instructions if name == word]


def read_stages(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif word:
            stages[-1].instructions.append((word, rest))
    return stages


def copied(rest: str) -> tuple[list[str], str]:
    """Return the sources and the target of a COPY from the build context."""
    *sources, target = [word for word in rest.split() if not word.startswith("--")]
    return sources, target


def exec_form(rest: str) -> list[str]:
    """Return the words of a command in its JSON form."""
    return list(json.loads(rest[rest.index("[") :]))
