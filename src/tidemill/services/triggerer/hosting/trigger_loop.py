"""The event loop of all triggers. No trigger can end it, or cancel the tasks of others on it.

Theory of operation. Each trigger runs in a context that names it (`RUN`), and everything it creates inherits that
context: tasks, callbacks, timers. The context therefore identifies the code that calls `sys.exit`, stops the loop or
cancels other triggers' tasks. That trigger fails; the loop continues. A call without such a context (from a plain
thread) is logged and ignored.

Invariants: the loop runs until its work is done. If it cannot, the process exits at once and stores nothing, so that
running triggers are run again.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import structlog

from tidemill.core.errors import describe_error
from tidemill.core.triggers.task_guard import CallingCode, Cancelling, judge_cancelling
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.log.writer import tell_repeats
from tidemill.runtime.process.exitcode import ExitCode

log = structlog.get_logger(__name__)

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[3]
_OURS = f"{_PACKAGE}{os.sep}"
_ASYNCIO = f"{Path(asyncio.__file__).parent}{os.sep}"
#: Coroutines of these files are parts of the host, whichever trigger's context they were started in.
_HOST = (
    *(f"{_PACKAGE / room}{os.sep}" for room in ("services", "store", "runtime", "triggers/producers")),
    *(str(_PACKAGE / "triggers/streams" / name) for name in ("life.py", "ack.py", "advancer.py")),
)

_STOPPED = "called loop.stop(), which would end all triggers; return from run() instead"


class Blamed(Protocol):
    """A trigger that can be failed for what its code has done to others.

    Attributes:
        disturbed: Whether others have cancelled a task that it may be waiting for.
    """

    disturbed: bool

    def blame(self, error: str) -> None:
        """Fail the trigger, because its code harms others."""


#: The trigger whose code is running.
RUN: ContextVar[Blamed | None] = ContextVar("tidemill_trigger_run", default=None)


class TriggerLoopTask(asyncio.Task[Any]):
    """A task of the loop.

    Attributes:
        owner: The trigger that owns it; None: the host owns it.
        creator: The trigger in whose context the host created it; None: in no trigger's context.
        guarded: Whether a trigger runs in it.
    """

    __slots__ = ("creator", "guarded", "owner")

    owner: Blamed | None
    creator: Blamed | None
    guarded: bool

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless the caller has no right to; return whether it will be cancelled."""
        loop = self.get_loop()
        if isinstance(loop, TriggerLoop) and loop.is_guarding and not self.done():
            caller, code = RUN.get(), _find_code(sys._getframe(1).f_code.co_filename)
            verdict = judge_cancelling(self.owner, caller, code, guarded=self.guarded, creator=self.creator)
            if verdict is Cancelling.REFUSED:
                loop.blame(caller, "cancelled tasks of others; cancel only its own tasks, not asyncio.all_tasks()")
                return False
            if verdict is Cancelling.DISTURBS and self.owner is not None:
                self.owner.disturbed = True
        return super().cancel(msg)


class TriggerLoop(asyncio.SelectorEventLoop):
    """The event loop of a trigger host.

    Attributes:
        is_guarding: Whether `run_to_end` is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_guarding = False
        self.set_task_factory(cast(Any, _create_task))

    def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work until it ends, whatever triggers do meanwhile.

        Raises:
            BaseException: The error of the work.
        """
        running = self.create_task(work)
        self.is_guarding = True
        try:
            while True:
                try:
                    return self.run_until_complete(running)
                except BaseException as error:
                    if running.done() and not running.cancelled():
                        raise
                    self._go_on_after(error, running)
        finally:
            self.is_guarding = False

    def stop(self) -> None:
        """Stop the loop, unless a trigger calls this."""
        caller = RUN.get()
        if self.is_guarding and caller is not None:
            self.blame(caller, _STOPPED)
        else:
            super().stop()

    def blame(self, run: Blamed | None, what: str) -> None:
        """Fail a trigger for what its code did; None: the trigger is unknown, so only log it."""
        if run is None:
            throttle(log, 10.0).error(f"code of an unknown trigger or thread {what}; the call is ignored")
        else:
            run.blame(f"a task or callback of the trigger {what}")

    def _go_on_after(self, error: BaseException, running: asyncio.Task[Any]) -> None:
        """Continue if the loop can after this error; otherwise exit the process."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            said = describe_error(error).rstrip(": ")
            self.blame(_find_run(error), f"raised {said}, which would end all triggers; raise an Exception in run()")
        elif isinstance(error, RuntimeError) and not running.done() and not self.is_closed():
            self.blame(None, _STOPPED)
        else:
            # Cancelling the tasks would not help: each trigger would report that as its own failure.
            log.critical("the event loop of all triggers cannot continue; the process exits", exc_info=error)
            tell_repeats()
            os._exit(ExitCode.INTERNAL)


def _create_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any],
    *,
    context: contextvars.Context | None = None,
    **options: Any,
) -> TriggerLoopTask:
    run = RUN.get() if context is None else context.get(RUN)
    code = getattr(work, "cr_code", None)
    is_host = code is not None and code.co_filename.startswith(_HOST)
    creator = None
    if is_host and run is not None and context is None:
        # For example, a trigger reads a variable and thereby connects the store for all.
        context, creator, run = contextvars.copy_context(), run, None
        context.run(RUN.set, None)
    task = TriggerLoopTask(work, loop=loop, context=context, **options)
    task.owner, task.creator, task.guarded = run, creator, is_host and run is not None
    return task


def _find_code(file: str) -> CallingCode:
    if file.startswith(_OURS):
        return CallingCode.HOST
    return CallingCode.ASYNCIO if file.startswith(_ASYNCIO) else CallingCode.OTHER


def _find_run(error: BaseException) -> Blamed | None:
    """Return the trigger whose callback or task raised an error while the loop was running it."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is asyncio.Handle._run.__code__:
            handle = trace.tb_frame.f_locals["self"]
            run: Blamed | None = handle._context.get(RUN)
            return run
        trace = trace.tb_next
    return None
