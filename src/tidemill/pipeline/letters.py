"""Makes a dead letter out of what a window knows: the messages, the task and how it failed.

What a program or a hook said is masked where it looks like a secret, as in logs; messages and payloads are kept as they
are, or they could not be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.config.redaction import redact_text
from tidemill.pipeline.models import ExecutorError
from tidemill.runtime.deadletter import Letter, LetterKind, letter_sources, redrives_of, stderr_tail
from tidemill.runtime.messages import SourceMessage

if TYPE_CHECKING:
    from tidemill.pipeline.tasks import TaskRun


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
        letter.stderr = redact_text(stderr_tail(error.stderr))
    return letter
