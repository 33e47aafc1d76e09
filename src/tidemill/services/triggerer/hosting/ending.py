"""How the end of a trigger's run is carried out, step by step, and what is reported of it."""

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


#: Of a longer error this many characters of each end are kept: it is masked and logged in the loop of all triggers.
_MAX_ERROR = 10_000
#: And this many of the line that lists show.
_MAX_SAID = 500


class RefusedEventError(TriggerError):
    """The store refuses an event; its raw event has failed, and the trigger may be on another one by now."""


async def run_step(trigger: str, what: str, step: Callable[[], Awaitable[Any]], timeout_seconds: float) -> None:
    """Run one step of a trigger's end; what it raises, and that it takes too long, is logged."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await step()
    except TimeoutError:
        log.exception(
            "a step of a trigger's end takes too long; it is cancelled",
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
    """Log how a run ended, and return what the store is to say.

    Args:
        spec: The trigger.
        number: Its id in the store.
        token: That of the claim under which it ran.
        following: What follows.
        reason: Why it was cancelled, if that is how it ended.
        fault: What went wrong, if anything did.
    """
    error = None
    if following.verdict is EndVerdict.FAILED:
        fault = fault or TriggerError("the trigger ended without having fired an event")
        if reason is CancelReason.TIMEOUT:
            fault = TriggerError("the trigger failed its shared stream, and did not end for 30 s; it was cancelled")
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
            # It may begin again every second, for ever; its events are logged.
            log.debug("a trigger ended, and begins again", trigger=spec.name, **about)
    return StateChange(number, token, _STATES[following.verdict], reason.value if reason is not None else None, error)


def format_fault(fault: BaseException, mask: Callable[[str], str] = redact_text) -> str:
    """Return an error with its traceback, secrets masked; without it, if the message is meant to say everything.

    The text is what every encoder and database accepts, and has a bounded length.

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
    # Each part is masked with what surrounds it, so that no half of a secret is taken for something else.
    head, tail = mask(text[: 2 * _MAX_ERROR])[:_MAX_ERROR], mask(text[-2 * _MAX_ERROR :])[-_MAX_ERROR:]
    return f"{head}\n... {len(text) - 2 * _MAX_ERROR:,} characters are left out ...\n{tail}"


def explain_fault(fault: BaseException, mask: Callable[[str], str] = redact_text) -> str:
    """Return an error as `format_fault` does, and what happened in its last line, which lists of tasks show."""
    described = describe_error(fault)
    own = described.partition(": ")[2].strip() or described
    said = own if isinstance(fault, TidemillError) else f"the trigger raised {described}"
    said = mask(said.replace("\0", "\\x00")).splitlines()[0][:_MAX_SAID].rstrip(": ")
    try:
        text = format_fault(fault, mask).strip()
    except Exception:  # its own `__str__` may raise, and its task must not wait for ever
        return said
    return text if text and "\n" not in text else f"{text}\n\n{said}".lstrip()
