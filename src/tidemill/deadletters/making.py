"""Makes every dead letter, of pipelines and of triggers, so that all of them say and hide the same.

What a program, a hook, a sink or a broker said is masked where it looks like a secret, as in logs, and so are the
arguments of the task; messages and payloads are kept as they are, or they could not be sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidemill.config.redaction import redact_text
from tidemill.deadletters.writer import STDERR_BYTES, Letter, LetterKind, letter_sources, redrives_of, stderr_tail
from tidemill.runtime.messages import SourceMessage

#: This much of the end of a task's stderr is masked; less of it is kept.
_MASKED_CHARS = 4 * STDERR_BYTES
#: This much of it is said in logs, and as the error of a letter.
_LAST_CHARS = 500


def last_words(stderr: str) -> str:
    """Return the end of what a program said, masked.

    Example:
        >>> last_words("login with password=hunter2 failed\\n")
        'login with password=*** failed'
    """
    return redact_text(stderr[-_MASKED_CHARS:].strip())[-_LAST_CHARS:]


def make_letter(
    kind: LetterKind,
    error: str,
    messages: Sequence[SourceMessage],
    *,
    attempts: int = 1,
    payloads: Sequence[str] = (),
    sink: tuple[str, str] = ("", ""),
    task_id: str | None = None,
    args: Iterable[object] = (),
    exit_code: int | None = None,
    stderr: str = "",
) -> Letter:
    """Return a letter about messages whose work ends here.

    Args:
        kind: What went wrong.
        error: In words.
        messages: The messages concerned; the letter carries all of them.
        attempts: How often the task, the delivery or the event was tried.
        payloads: What was to be delivered and is not, each as JSON.
        sink: Type and name of the sink that refused them.
        task_id: The task concerned, if there is one.
        args: Its arguments.
        exit_code: What it returned.
        stderr: Its standard error; the end of it is kept.
    """
    return Letter(
        kind=kind,
        error=redact_text(error),
        original_payloads=list(payloads),
        sink_type=sink[0],
        sink_name=sink[1],
        partition=messages[0].partition if messages else None,
        attempt_count=attempts,
        redrives=redrives_of(messages),
        task_id=task_id,
        args=[redact_text(str(argument)) for argument in args],
        exit_code=exit_code,
        # Masked before it is cut: a secret that is cut in two would not be known as one.
        stderr=stderr_tail(redact_text(stderr[-_MASKED_CHARS:])),
        sources=letter_sources(messages),
    )
