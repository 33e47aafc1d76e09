"""Runs hooks on the loop: hooks that never suspend cost one function call, hooks that suspend run concurrently.

A pool of asyncio tasks, the runners, takes jobs from one queue. A runner continues with the next job as long as hooks
return without suspending; as soon as one suspends, the pump gives the rest of the queue to another runner. So
`asyncio.timeout`, context variables and cancellation work as in any task, without one task per hook.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from tidemill.core.errors import HandlerError, describe_error
from tidemill.runtime.kafka.source_message import MessageSpan
from tidemill.runtime.log.setup import kind_of, throttle
from tidemill.runtime.log.user_code import explain_error
from tidemill.runtime.loop.durations import Durations
from tidemill.runtime.loop.engine_tasks import EngineTasks

#: A burst of hooks yields to the loop after this many jobs, or after this time.
BURST = 64
TURN_SECONDS = 0.01

#: A hook that has not returned for this long is reported as stalled.
HOOK_SECONDS = 10.0
#: Equal failures are logged once in this many seconds.
LOG_SECONDS = 10.0
#: At most this many unreturned hooks are examined, and at most this many are named.
MAX_OVERDUE = 1_000
MAX_PLACES = 20

T = TypeVar("T")
#: A callback passed to `HookCalls.begun` along with an argument; called with that argument, it returns the hook's
#: partition and messages.
Locate = Callable[[Any], MessageSpan]


#: The hook that was called last: the fallback to name the hook that blocked the loop.
latest: list[Awaitable[Any] | None] = [None]


class OpenCall(NamedTuple):
    """A hook that has not returned.

    Attributes:
        hook: The hook's name.
        seconds: The time since it was called.
        span: The messages that it was called for.
    """

    hook: str
    seconds: float
    span: MessageSpan


class HookCalls:
    """The hooks of an engine that were called and have not returned yet, oldest first.

    Args:
        tasks: The engine tasks that the hooks run in.
    """

    __slots__ = ("_open", "_tasks", "durations", "last_ended_at")

    def __init__(self, tasks: EngineTasks | None = None) -> None:
        self._tasks = tasks
        self._open: dict[int, tuple[float, str, Locate, Any]] = {}
        #: How long the calls of each hook took.
        self.durations: dict[str, Durations] = {}
        #: When a call last ended, in monotonic seconds.
        self.last_ended_at = 0.0

    def begun(self, key: int, name: str, locate: Locate, what: Any) -> None:
        """Register a call; `locate(what)` returns its messages and is called only for reports."""
        # A plain function may return one future for several calls; they all end with it.
        self._open.setdefault(key, (time.monotonic(), name, locate, what))

    def ended(self, key: int) -> None:
        """Remove a call and note how long it took."""
        now, call = time.monotonic(), self._open.pop(key, None)
        self.last_ended_at = now
        if call is None:
            return
        since, name, _, _ = call
        try:
            durations = self.durations[name]
        except KeyError:
            durations = self.durations[name] = Durations()
        durations.add(now - since)

    def cancels_itself(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a hook cancelled its own task; if so, undo the cancellation so that the task continues."""
        if self._tasks is None or self._tasks.is_ending(task):
            return False
        while task.uncancel():
            pass
        return True

    def describe_wait(self) -> dict[str, str]:
        """Return the hooks that have not returned for too long; see `find_unreturned`."""
        return self.find_unreturned(HOOK_SECONDS)

    def find_unreturned(self, seconds: float) -> dict[str, str]:
        """Return the hooks that have not returned for this long, by name and partition; the oldest call of each."""
        now = time.monotonic()
        found: dict[str, str] = {}
        more: Counter[str] = Counter()
        for since, name, locate, what in itertools.islice(self._open.values(), MAX_OVERDUE):
            if now - since < seconds:
                break
            partition, messages, _, _ = locate(what)
            key = f"{name} of {partition}" if partition else name
            if key in found:
                more[key] += 1
            elif len(found) < MAX_PLACES:
                of = f" ({messages})" if messages else ""
                found[key] = f"has not returned for {now - since:.0f} s{of}"
        return {key: f"{text}; and {more[key]} more calls" if more[key] else text for key, text in found.items()}

    def list_open(self) -> list[OpenCall]:
        """Return the calls that have not returned, the oldest first and at most `MAX_OVERDUE`."""
        now = time.monotonic()
        calls = itertools.islice(self._open.values(), MAX_OVERDUE)
        return [OpenCall(name, now - since, locate(what)) for since, name, locate, what in calls]


def locate_nowhere(_: object) -> MessageSpan:
    """Return an empty location, for hooks that belong to no partition."""
    return MessageSpan()


async def call_hook(
    hook: Awaitable[T],
    calls: HookCalls | None = None,
    name: str = "",
    locate: Locate = locate_nowhere,
    what: Any = None,
) -> T:
    """Await a user's hook; only a cancellation of this task itself may cancel it.

    Args:
        hook: The awaitable that the hook returned.
        calls: Where the call is registered while it runs.
        name: The hook's name.
        locate: See `HookCalls.begun`.
        what: See `HookCalls.begun`.

    Raises:
        TypeError: The result cannot be awaited: the hook is a plain function or an async generator.
        HandlerError: The hook cancelled itself, called `sys.exit()`, or raised another `BaseException` that is not an
            `Exception`. Unwrapped, each of these would end the engine instead of failing one message.
    """
    latest[0] = hook
    if calls is not None:
        calls.begun(id(hook), name, locate, what)
    try:
        return await hook
    except TypeError as error:
        if inspect.isawaitable(hook):
            raise
        what = "an async generator" if inspect.isasyncgen(hook) else f"a {type(hook).__name__}"
        raise TypeError(f"{name or 'the hook'} returned {what}; it must be an `async def` without `yield`") from error
    except SystemExit as error:
        raise HandlerError(f"the hook called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or (task.cancelling() and not (calls is not None and calls.cancels_itself(task))):
            raise
        raise HandlerError("the hook was cancelled from within (asyncio.CancelledError)") from error
    except Exception:
        raise
    except BaseException as error:  # includes the PanicException of Rust extensions
        raise HandlerError(f"the hook raised {describe_error(error)}") from error
    finally:
        if calls is not None:
            calls.ended(id(hook))


def begin_hook(hook: Callable[..., Awaitable[T]], *arguments: Any) -> Awaitable[T]:
    """Call a user's hook for `call_hook`, and treat the exceptions of a plain function as `call_hook` does.

    Raises:
        HandlerError: The hook called `sys.exit()`, or raised another `BaseException` that is not an `Exception`.
    """
    try:
        return hook(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise HandlerError(f"the hook raised {describe_error(error)}") from error


def check_returned(check: Callable[..., T], *arguments: Any) -> T:
    """Check a hook's result, which may run code of the user's own classes.

    Raises:
        HandlerError: That code called `sys.exit()`, or raised another `BaseException` that is not an `Exception`.
    """
    try:
        return check(*arguments)
    except Exception:
        raise
    except BaseException as error:
        raise HandlerError(f"the hook's result raised {describe_error(error)}") from error


def log_hook_error(log: Any, hook: str, error: Exception, event: str = "a hook raised", **details: object) -> str:
    """Log a hook's exception and return its description."""
    about = (hook, kind_of(describe_error(error)))
    throttle(log, LOG_SECONDS, about=about).warning(event, hook=hook, exc_info=error, **details)
    return f"{hook}: {explain_error(error, hook)}"


def _wake_one(waiters: deque[asyncio.Future[None]]) -> bool:
    """Wake the first waiter that is not cancelled; return whether there was one."""
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return True
    return False


class HookRunner:
    """Runs jobs in order of submission; jobs that suspend overlap. A job handles its own errors."""

    def __init__(self, tasks: EngineTasks | None = None) -> None:
        self._engine_tasks = tasks or EngineTasks()
        #: The hooks that have not returned.
        self.calls = HookCalls(self._engine_tasks)
        self._jobs: deque[tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Runners that paused within a job by `give_turn`, and whether the pump next wakes a runner for the queue
        # instead.
        self._resting: deque[asyncio.Future[None]] = deque()
        self._queue_is_next = False
        self._turn_at = 0.0
        self.running = 0

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return bool(self._jobs) or self.running > 0

    @property
    def is_turn_due(self) -> bool:
        """Whether hooks have run for so long that the loop should get a turn."""
        return self.calls.last_ended_at - self._turn_at > TURN_SECONDS

    async def give_turn(self) -> None:
        """Yield to everything else that is due; called by jobs that call many hooks."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting.append(waiter)
        self._pump_soon()
        await waiter

    def submit(self, job: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Queue `job(*args)`; it starts in one of the next turns of the loop."""
        self._jobs.append((job, args))
        self._pump_soon()

    def submit_first(self, job: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Queue the rest of a job in front of all others; the loop gets a turn before any job runs."""
        self._jobs.appendleft((job, ()))
        self._turn_at = -math.inf
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Wake one runner, alternating between paused ones and the queue."""
        self._pumping = False
        if self._closed or not (self._jobs or self._resting):
            return
        self._turn_at = time.monotonic()
        self._queue_is_next = bool(self._jobs) and (self._queue_is_next or not self._resting)
        if not self._queue_is_next:
            self._queue_is_next = True
            _wake_one(self._resting)
        else:
            self._queue_is_next = False
            if not _wake_one(self._idle):
                task = self._engine_tasks.run("a runner of hooks", self._run())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        # The runner just woken steps first and takes the queue; if one of its hooks suspends, this call finds the rest.
        self._pump_soon()

    async def _run(self) -> None:
        jobs = self._jobs
        count = 0
        while True:
            while jobs:
                job, args = jobs.popleft()
                self.running += 1
                try:
                    await job(*args)
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    # The messages of the failed job would never be resolved, so the engine must end.
                    self._engine_tasks.fault(f"the job {job.__qualname__}", error)
                finally:
                    self.running -= 1
                del job, args  # a runner may be idle for long; do not keep the job's objects alive
                count += 1
                if count % BURST == 0 or self.is_turn_due:
                    break  # if jobs are left, the pump runs and wakes a runner in the next turn
            if self._closed or len(self._idle) >= 16:
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    async def close(self) -> None:
        """Cancel the running jobs and drop the queued ones."""
        self._closed = True
        self._jobs.clear()
        await self._engine_tasks.stop(*self._tasks)
