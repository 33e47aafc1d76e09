"""Which tasks of the event loop that all triggers share may be cancelled, and by whom.

Theory of operation. A task belongs to the trigger in whose context it was created, or to none. A loop over
`asyncio.all_tasks()` in one trigger that cancels them all must not reach the tasks in which others run, nor any that
belongs to none. The helper tasks of triggers can be cancelled, because code that several triggers share may end what
one of them has begun; but a trigger whose helper was cancelled by others has not failed by itself.
"""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """Whose code calls: the host's, that of asyncio (timeouts, groups), or any other."""

    HOST = "host"
    ASYNCIO = "asyncio"
    OTHER = "other"


class Cancelling(enum.Enum):
    """What is to be done about a cancellation.

    ALLOWED: it is none of our business. DISTURBS: it is carried out, and the owner of the task is not to blame for what
    follows. REFUSED: nothing happens to the task.
    """

    ALLOWED = "allowed"
    DISTURBS = "disturbs"
    REFUSED = "refused"


def judge_cancelling(
    owner: object | None, caller: object | None, code: Code, *, guarded: bool, creator: object | None = None
) -> Cancelling:
    """Decide what is to be done about a call of a task's `cancel`.

    Args:
        owner: The trigger that the task belongs to; None: the host, or a library outside of any trigger.
        caller: The trigger in whose context the call is made; None: it is made in none.
        code: Whose code calls.
        guarded: Whether a trigger runs in the task.
        creator: The trigger in whose context a part of the host has created a task of its own.

    Example:
        >>> judge_cancelling("a trigger", "another one", Code.OTHER, guarded=True)
        <Cancelling.REFUSED: 'refused'>
    """
    if code is Code.HOST or (caller is not None and caller is owner):
        return Cancelling.ALLOWED
    if owner is not None:
        return Cancelling.REFUSED if guarded else Cancelling.DISTURBS
    # Timeouts and groups of the host that run in a trigger's context end what they have created there.
    ends_own = code is Code.ASYNCIO and caller is creator
    return Cancelling.ALLOWED if caller is None or ends_own else Cancelling.REFUSED
