"""Prepares the arguments and errors of tasks for recording; see `recorder.format.recordable_text`.

Invariant: a text is masked before it is cut, so that no part of a secret remains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tidemill.config.redaction import redact_argument
from tidemill.core.errors import escape_surrogates
from tidemill.deadletters.letter import summarize_stderr
from tidemill.pipeline.handler.models import ExecutorError

#: The limit of each argument of a task, and of all its arguments together.
MAX_ARG_CHARS = 4_096
MAX_ARGS_CHARS = 16_384
MAX_LABELS = 50


def describe_failure(error: ExecutorError) -> str:
    """Return the failure of a task in the words of its dead letter."""
    return error.exception or summarize_stderr(error.stderr) or f"exit code {error.exit_code}"


@functools.lru_cache(4_000)
def _clean_short_arg(arg: str, before: str) -> str:
    return redact_argument(escape_surrogates(arg), before)


def clean_args(args: Iterable[str]) -> list[str]:
    """Return the cleaned arguments of a task; those beyond the limits are omitted."""
    cleaned: list[str] = []
    left = MAX_ARGS_CHARS
    option = ""
    for text in args:
        before, option = option, text if len(text) <= 100 and text.startswith("-") else ""
        if len(text) <= 100:
            text = _clean_short_arg(text, before)
        else:
            text = redact_argument(escape_surrogates(text[: 4 * MAX_ARG_CHARS]), before)[:MAX_ARG_CHARS]
        left -= len(text)
        if left < 0:
            cleaned.append("...")
            break
        cleaned.append(text)
    return cleaned
