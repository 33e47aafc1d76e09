"""Decides which asyncio tasks a trigger may cancel in the event loop that all triggers share.

Theory of operation. A task belongs to the trigger in whose context it was created, or to none. A trigger that loops
over `asyncio.all_tasks()` and cancels them all must not reach the tasks in which other triggers run, nor any task
without an owner. Helper tasks of triggers can be cancelled, because code that several triggers share may end what one
of them started; but a trigger whose helper was cancelled by another one has not failed by itself.
"""

from __future__ import annotations

import enum


class CallingCode(enum.Enum):
    """The origin of a call: the host, asyncio itself (timeouts, groups), or any other code."""

    HOST = "host"
    ASYNCIO = "asyncio"
    OTHER = "other"


class Cancelling(enum.Enum):
    """The decision about a cancellation.

    ALLOWED: cancel the task. DISTURBS: cancel it, but do not blame its owner for the consequences. REFUSED: do not
    cancel it.
    """

    ALLOWED = "allowed"
    DISTURBS = "disturbs"
    REFUSED = "refused"


def judge_cancelling(
    owner: object | None, caller: object | None, code: CallingCode, *, guarded: bool, creator: object | None = None
) -> Cancelling:
    """Decide about a call of a task's `cancel`.

    Args:
        owner: The trigger that the task belongs to; None: the host, or a library outside of any trigger.
        caller: The trigger in whose context the call is made; None: no trigger's.
        code: The code that makes the call.
        guarded: Whether a trigger runs in the task.
        creator: The trigger in whose context the host created a task of its own.

    Example:
        >>> judge_cancelling("a trigger", "another one", CallingCode.OTHER, guarded=True)
        <Cancelling.REFUSED: 'refused'>
    """
    if code is CallingCode.HOST or (caller is not None and caller is owner):
        return Cancelling.ALLOWED
    if owner is not None:
        return Cancelling.REFUSED if guarded else Cancelling.DISTURBS
    # Timeouts and groups of the host that run in a trigger's context may cancel the tasks they created there.
    ends_own = code is CallingCode.ASYNCIO and caller is creator
    return Cancelling.ALLOWED if caller is None or ends_own else Cancelling.REFUSED
