"""Completion in bash of values with a colon, such as `module:Class`.

Bash also splits words at colons: it reports `jobs:O` as the words `jobs`, `:` and `O`, and replaces only the part after
the colon. Typer's completion would take these for three arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from typer._click.shell_completion import CompletionItem, add_completion_class
from typer._completion_classes import BashComplete


def join_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words of a line as typed, and the part of the last word that bash keeps.

    Args:
        words: The words as bash splits them; the last one is being completed, and is empty after a space.

    Example:
        >>> join_words(["run", "--handler", "jobs", ":", "O"])
        (['run', '--handler', 'jobs:O'], 'jobs:')
        >>> join_words(["--handler", "jobs", ":", "Orders", ""])
        (['--handler', 'jobs:Orders', ''], '')
    """
    joined: list[str] = []
    after_colon = False
    for word in words:
        if joined and word and (after_colon or _is_colon(word)):
            joined[-1] += word
        else:
            joined.append(word)
        after_colon = _is_colon(word)
    replaced = "" if after_colon else words[-1]
    return joined, joined[-1].removesuffix(replaced)


def _is_colon(word: str) -> bool:
    return bool(word) and not word.strip(":")


class BashWords(BashComplete):
    """Typer's completion for bash, on words as they were typed."""

    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that word."""
        before, incomplete = super().get_completion_args()
        words, self._kept = join_words([*before, incomplete])
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Return the text that replaces the part after the last colon."""
        return super().format_completion(item).removeprefix(self._kept)


def register() -> None:
    """Use this completion in bash; call it after Typer has registered its own."""
    add_completion_class(BashWords, "bash")
