"""Applies `.airflowignore` files to a folder of DAGs, by the rules of `.gitignore`.

A file's patterns apply below its folder, after the patterns of parent folders; the last matching pattern decides. An
ignored folder is ignored with all its content.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

log = structlog.get_logger(__name__)

IGNORE_FILE: Final = ".airflowignore"


class IgnoreRules:
    """The patterns that apply in a folder.

    Args:
        rules: Pairs of a folder and its patterns, from the outermost folder to this one.
    """

    def __init__(self, rules: tuple[tuple[Path, GitIgnoreSpec], ...] = ()) -> None:
        self._rules = rules

    def enter(self, folder: Path) -> IgnoreRules:
        """Return the patterns that apply in a subfolder."""
        path = folder / IGNORE_FILE
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return self
        own = _read_patterns(path, lines)
        return IgnoreRules((*self._rules, (folder, own)))

    def ignores(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether a file or folder directly in this folder is ignored."""
        for folder, patterns in reversed(self._rules):
            name = path.relative_to(folder).as_posix()
            decision = patterns.check_file(f"{name}/" if is_folder else name).include
            if decision is not None:
                return decision
        return False


def _read_patterns(path: Path, lines: list[str]) -> GitIgnoreSpec:
    """Return the patterns of a file; invalid ones are logged and skipped."""
    from pathspec import GitIgnoreSpec

    right = []
    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError as error:
            log.warning("ignoring an invalid pattern", file=str(path), line=number, error=str(error))
        else:
            right.append(line)
    return GitIgnoreSpec.from_lines(right)
