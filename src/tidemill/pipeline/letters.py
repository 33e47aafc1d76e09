"""Makes a dead letter out of what a window knows: the messages, the task and how it failed.

What a program or a hook said is masked where it looks like a secret, as in logs; messages and payloads are kept as they
are, or they could not be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.config.redaction import redact_text
from tidemill.pipeline.models import ExecutorError
from tidemill.runtime.deadletter import STDERR_BYTES, Letter, LetterKind, letter_sources, redrives_of, stderr_tail
from tidemill.runtime.messages import SourceMessage

if TYPE_CHECKING:
    from tidemill.pipeline.tasks import TaskRun


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
    text: str,
    messages: Sequence[SourceMessage],
    run: TaskRun | None,
    error: ExecutorError | None,
    payloads: Sequence[str] = (),
) -> Letter:
    """Return a letter about messages whose work ends here.

    Args:
        kind: What went wrong.
        text: In words.
        messages: The messages concerned; the letter carries all of them.
        run: The task concerned, if there is one.
        error: How it failed, if it did.
        payloads: What a hook wanted delivered and is not, each as JSON.
    """
    letter = Letter(
        kind=kind,
        error=redact_text(text),
        sources=letter_sources(messages),
        partition=messages[0].partition if messages else None,
        attempt_count=1,
        redrives=redrives_of(messages),
        original_payloads=list(payloads),
    )
    if run is not None:
        letter.task_id = run.task.task_id
        letter.args = [redact_text(str(argument)) for argument in run.task.args]
        letter.attempt_count = max(1, run.attempts)
    if error is not None:
        letter.exit_code = error.exit_code
        # Masked before it is cut: a secret that is cut in two would not be known as one.
        letter.stderr = stderr_tail(redact_text(error.stderr[-_MASKED_CHARS:]))
    return letter
