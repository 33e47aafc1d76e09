"""Runs the last steps of a trigger's run, and reports the outcome."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TidemillError, describe_error, escape_surrogates
from tidemill.core.triggers.lifecycle import CancelReason, EndVerdict, Next
from tidemill.services.triggerer.hosting.loading import TriggerError
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.store.records import TriggerSpec, TriggerState

log = structlog.get_logger(__name__)

_STATES = {
    EndVerdict.FINISHED: TriggerState.FINISHED,
    EndVerdict.FAILED: TriggerState.FAILED,
    EndVerdict.CANCELLED: TriggerState.CANCELLED,
}


#: Longer errors are cut to this many characters at each end, because the loop of all triggers masks and logs them.
_MAX_ERROR = 10_000
#: Length limit of the one-line summary that lists show.
_MAX_SAID = 500


class RefusedEventError(TriggerError):
    """The store refused an event. Its raw event has already failed, and the trigger may be processing the next one."""


async def run_step(trigger: str, what: str, step: Callable[[], Awaitable[Any]], timeout_seconds: float) -> None:
    """Run one step of a trigger's end; log its errors and a timeout instead of raising them."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await step()
    except TimeoutError:
        log.exception(
            "a step of a trigger's end timed out and was cancelled",
            trigger=trigger,
            step=what,
            seconds=timeout_seconds,
        )
    except asyncio.CancelledError:
        log.warning("a step of a trigger's end was cancelled", trigger=trigger, step=what)
    except BaseException:  # KeyboardInterrupt would end the loop of all triggers
        log.exception("a step of a trigger's end failed", trigger=trigger, step=what)


def report_ending(
    spec: TriggerSpec,
    number: int,
    token: int,
    following: Next,
    reason: CancelReason | None,
    fault: BaseException | None,
) -> StateChange:
    """Log how a run ended, and return the state change for the store.

    Args:
        spec: The trigger.
        number: Its id in the store.
        token: The token of the claim under which it ran.
        following: The verdict, and whether the trigger restarts.
        reason: Why the run was cancelled; None: it was not.
        fault: The error that ended the run; None: it ended without an error.
    """
    error = None
    if following.verdict is EndVerdict.FAILED:
        fault = fault or TriggerError("the trigger ended without having fired an event")
        if reason is CancelReason.TIMEOUT:
            fault = TriggerError("the trigger failed its shared stream, did not end within 30 s, and was cancelled")
        error = format_fault(fault)
        pause = following.pause_seconds
        log.error(
            "a trigger failed",
            trigger=spec.name,
            classpath=spec.classpath,
            restarts_in_seconds=round(pause, 1) if pause is not None else None,
            error=error,
        )
    elif reason is not CancelReason.SHUTDOWN:
        about = {"verdict": following.verdict.value} | ({"reason": reason.value} if reason is not None else {})
        if following.pause_seconds is None:
            log.info("a trigger ended", trigger=spec.name, **about)
        else:
            # A trigger may restart every second, indefinitely; its events are logged anyway.
            log.debug("a trigger ended and restarts", trigger=spec.name, **about)
    return StateChange(number, token, _STATES[following.verdict], reason.value if reason is not None else None, error)


def format_fault(fault: BaseException, mask: Callable[[str], str] = redact_text) -> str:
    """Return an error with its traceback, secrets masked; a TidemillError without a cause comes without traceback.

    Every encoder and database accepts the text, and its length is bounded.

    Args:
        fault: The error.
        mask: Masks secrets in a text.
    """
    has_cause = fault.__cause__ is not None or (fault.__context__ is not None and not fault.__suppress_context__)
    is_whole = isinstance(fault, TidemillError) and not has_cause
    text = str(fault) if is_whole else "".join(traceback.format_exception(fault))
    text = escape_surrogates(text).replace("\0", "\\x00")
    if len(text) <= 2 * _MAX_ERROR:
        return mask(text)
    # Mask each part together with its surroundings, so that a secret on the cut is still recognized.
    head, tail = mask(text[: 2 * _MAX_ERROR])[:_MAX_ERROR], mask(text[-2 * _MAX_ERROR :])[-_MAX_ERROR:]
    return f"{head}\n... {len(text) - 2 * _MAX_ERROR:,} characters omitted ...\n{tail}"


def explain_fault(fault: BaseException, mask: Callable[[str], str] = redact_text) -> str:
    """Return an error as `format_fault` does, with a summary in its last line, which lists of tasks show."""
    described = describe_error(fault)
    own = described.partition(": ")[2].strip() or described
    said = own if isinstance(fault, TidemillError) else f"the trigger raised {described}"
    said = mask(said.replace("\0", "\\x00")).splitlines()[0][:_MAX_SAID].rstrip(": ")
    try:
        text = format_fault(fault, mask).strip()
    except Exception:  # the error's own `__str__` may raise; its task must still end
        return said
    return text if text and "\n" not in text else f"{text}\n\n{said}".lstrip()
