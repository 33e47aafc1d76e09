"""Runs all elements of a task in one attempt: `iterate` and `iterate_kwargs`.

Theory of operation: a feeder thread reads from the store which elements have to run, a page ahead of the work. Workers
run them: coroutines on the loop of the main thread if the function is `async`, threads otherwise. A keeper thread sends
what elements returned to the store, in groups. An element whose function fails is run again after the retry delay of
the task, in this attempt or in the next one.

Invariants: what is stored as done is never run again, because the store leaves it out. A result that is not stored yet
when the process dies is run again. Nothing waits for user code in a thread: those threads die with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import heapq
import inspect
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tidemill.core.errors import InvariantError, RemoteError, TidemillError, describe_error, escape_surrogates
from tidemill.core.wording import format_count, shorten
from tidemill.dags.attempt.current import is_interrupted, telling
from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.task_services import ChunkItem, IterationPart, PartOutcome, TaskServices
from tidemill.dags.exceptions import TaskDeferred, TaskError, TaskFailed, TaskSkipped, TaskTimeout
from tidemill.dags.map_sources import LeafItem
from tidemill.dags.operators.python import PythonOperator, select_context
from tidemill.dags.templates import find_texts, has_marks
from tidemill.runtime.json.codec import encode

log = logging.getLogger(__name__)

#: The time from one group of results to the next.
_GROUP_SECONDS: Final = 0.05
#: The most results of a group; workers wait while more are not sent.
_MAX_GROUP: Final = 1_000
_MAX_GROUP_BYTES: Final = 4 << 20
#: The number of items that are read ahead of the work, and the characters from which on no more are read.
_AHEAD: Final = 1_000
_AHEAD_CHARACTERS: Final = 8 << 20
#: The most failed elements that wait for a retry in memory; the store knows the others.
_MAX_RETRYING: Final = 1_000
#: How often the keeper of results looks whether the attempt was interrupted.
_LOOK_SECONDS: Final = 0.25
#: How long to wait between two looks for elements of a source that gives none now.
_POLL_SECONDS: Final = 0.05
_MAX_POLL_SECONDS: Final = 0.5
#: How long failed elements may wait in an attempt; for longer ones, the attempt gives its worker back.
_MAX_WAIT_SECONDS: Final = 5.0
#: The number of elements that a worker of the loop runs in a row.
_TURNS: Final = 16
#: The store refuses larger results.
_MAX_VALUE_BYTES: Final = 1 << 20
_MAX_ERROR: Final = 1_000


class PlaceLeft(BaseException):
    """Ends an attempt that waits for elements where it cannot keep its process; no `except Exception` catches it."""


class ElementsWait(TaskError):
    """Elements have failed and wait for their retry, in another attempt."""


@dataclass(frozen=True, slots=True)
class ElementToRun:
    """An element to run.

    Attributes:
        number: Its index.
        tries: How often it has failed.
        items: What its arguments are made of.
        size: The number of characters of these.
    """

    number: int
    tries: int
    items: tuple[ChunkItem, ...]
    size: int


class Result(NamedTuple):
    """The outcome of an element, as it is stored."""

    number: int
    state: str
    tries: int
    value: str | None
    error: str | None
    started_us: int


class ElementRunner:
    """Builds the arguments of elements and calls the task's function or operator with them.

    Args:
        mapped: The task.
        context: The context of the attempt.
        services: The access to the store.
        render: Renders the template fields of an operator: operator, context, and values that are data.
        render_value: Renders values of the file: the values, the context, and which of them are data.
    """

    def __init__(
        self,
        mapped: Any,
        context: Context,
        services: TaskServices,
        render: Callable[[Any, Context, Any], None],
        render_value: Callable[[Any, Context, Any], Any],
    ) -> None:
        self._mapped, self._context, self._services = mapped, context, services
        self._render, self._render_value = render, render_value
        is_plain = mapped.operator_class is PythonOperator and "python_callable" not in mapped.expand_input.sources
        #: The function that an element calls; None: it executes an operator.
        self._function: Any = mapped.python_callable if is_plain else None
        self.is_async = inspect.iscoroutinefunction(self._function)
        self._renders_values = mapped.expand_input.has_literals
        #: Whether the arguments that all elements share may have other values in each.
        self._varies = not mapped.maps_function or any(map(has_marks, find_texts(mapped.op_kwargs).values()))
        #: The arguments that all elements share, rendered.
        self._shared: Mapping[str, Any] | None = None
        #: The context values that the function takes; None: not known yet.
        self._wanted: tuple[str, ...] | None = None
        #: The operators that are executed now.
        self._operators: list[Any] = []
        self._lock = threading.Lock()

    def list_operators(self) -> list[Any]:
        """Return the operators that are executed now; those of an attempt that ends are to be killed."""
        with self._lock:
            return list(self._operators)

    def prepare(self, part: ElementToRun) -> tuple[dict[str, Any], Any, Context]:
        """Return the arguments of an element, which of them are data, and its context."""
        context = _make_context(self._context, part.number)
        found = [
            self._mapped.evaluate(
                [LeafItem(*leaf) for leaf in zip(item.leaf_indexes, item.elements, strict=True)], context["ti"]
            )
            for item in part.items
        ]
        if self._mapped.chunking is None:
            return (*found[0], context)
        (name,) = self._mapped.expand_input.sources
        return {name: [values[name] for values, _ in found]}, [one for _, data in found for one in data], context

    def find_call(self, part: ElementToRun) -> tuple[Context, Callable[[], Any]]:
        """Return the context of an element, and the call that runs it, which may return an awaitable."""
        values, data, context = self.prepare(part)
        if self._function is None:
            return context, lambda: self._execute(values, data, context)
        if self._varies:
            operator = self._mapped.unmap(values)
            self._render(operator, context, data)
            args, kwargs = tuple(operator.op_args), operator.op_kwargs
        else:
            args = ()
            with self._lock:
                if self._shared is None:
                    self._shared = self._render_shared(values, data)
            if self._renders_values:
                values = self._render_value(values, context, data)
            kwargs = {**self._shared, **values}
        wanted = self._select(args, kwargs, context)
        return context, lambda: self._function(*args, **kwargs, **wanted)

    def _render_shared(self, values: Mapping[str, Any], data: Any) -> dict[str, Any]:
        operator = self._mapped.unmap(values)
        self._render(operator, self._context, data)
        shared = self._mapped.op_kwargs
        return {name: value for name, value in operator.op_kwargs.items() if name in shared}

    def _select(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """Return the context values for the function; which it takes is usually the same for all elements."""
        if self._varies or self._mapped.expand_input.is_kwargs:
            return select_context(self._function, args, kwargs, context)
        if self._wanted is None:
            self._wanted = tuple(select_context(self._function, (), kwargs, context))
        return {name: context[name] for name in self._wanted}

    def _execute(self, values: Mapping[str, Any], data: Any, context: Context) -> Any:
        operator = self._mapped.unmap(values)
        context["task"] = context["ti"].task = operator
        self._render(operator, context, data)
        with self._lock:
            self._operators.append(operator)
        try:
            operator.pre_execute(context)
            result = operator.execute(context)
            operator.post_execute(context, result)
        finally:
            with self._lock:
                self._operators = [one for one in self._operators if one is not operator]
        return result


def _make_context(context: Context, number: int) -> Context:
    instance = copy.copy(context["ti"])
    instance.map_index = number
    return context.extend({"ti": instance, "task_instance": instance})


class Iteration:
    """Runs the elements of an attempt.

    Args:
        mapped: The task.
        runner: Runs one element.
        services: The access to the store.
        try_number: The try of the attempt.
        max_tries: The number of tries.
        read_clock: Returns the seconds of a clock that never goes back.
    """

    def __init__(
        self,
        mapped: Any,
        runner: ElementRunner,
        services: TaskServices,
        try_number: int,
        max_tries: int,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mapped, self._runner, self._services, self._read_clock = mapped, runner, services, read_clock
        self._is_last = try_number >= max_tries
        self._element_tries = int(mapped.retries) + 1
        self._delay = mapped.retry_delay.total_seconds()
        self._linger = float(mapped.operator_class.stream_linger)
        self._concurrency = int(mapped.task_concurrency or os.cpu_count() or 1)
        size = 1 if mapped.chunking is None else mapped.chunking.max_items
        #: The number of elements that are read at a time.
        self._ahead = max(1, min(_AHEAD // size, _AHEAD))
        self._changed = threading.Condition()
        self._parts: deque[ElementToRun] = deque()
        #: The characters of the items of elements that wait to be run, and of those that wait for a retry.
        self._waiting_size = self._retrying_size = 0
        self._retrying: list[tuple[float, int, ElementToRun]] = []
        self._order = itertools.count()
        self._left_out = False
        self._running = 0
        #: All elements are read, and none waits; or the attempt stops.
        self._is_done = self._is_stopping = False
        self._waits = False
        self._error: BaseException | None = None
        self._results: deque[Result] = deque()
        self._size = 0
        self._seen = 0
        self._sending = False
        self._counts: PartOutcome | None = None
        self._wake: Callable[[], None] = lambda: None

    def run(self) -> PartOutcome:
        """Run all elements, and return how they ended.

        Raises:
            ElementsWait: Elements that have failed wait for their next try.
            TaskTimeout: The attempt was interrupted.
            TaskError: The store refuses a result, for example because the attempt has been replaced.
        """
        threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"tidemill-{name}", daemon=True)
            for name, work in (("elements", self._feed), ("results", self._keep))
        ]
        for thread in threads:
            thread.start()
        try:
            if self._runner.is_async:
                asyncio.run(self._run_async())
            else:
                self._run_threads()
        except BaseException:
            # An interruption may have come just after the lock was taken.
            with contextlib.suppress(RuntimeError):
                while True:
                    self._changed.release()
            # Results that are there are stored; a call under way uses the connection of the attempt's report.
            self._stop()
            raise
        finally:
            with self._changed:
                self._is_done = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        if self._is_stopping:
            raise TaskTimeout("an element has ignored that its attempt was interrupted")
        if self._waits:
            raise ElementsWait("elements that have failed wait for their next try")
        assert self._counts is not None
        return self._counts

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._wake()

    # -- what is to be run ---------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Read elements ahead of the work, until the source has closed and all have ended."""
        after, closed, pause = -1, False, _POLL_SECONDS
        idle_since: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._wants_parts, self._find_pause())
                if self._is_stopping:
                    return
                self._take_due()
                if not self._wants_parts:
                    continue
                if closed:
                    if self._has_ended():
                        self._is_done = True
                        self._changed.notify_all()
                        self._wake()
                        return
                    if self._left_out and not (self._parts or self._running or self._retrying):
                        # They are to be tried again, as the store knows; it does so once it has all results.
                        self._changed.wait_for(lambda: self._is_stopping, self._delay)
                        self._changed.wait_for(lambda: self._is_stopping or not (self._results or self._sending))
                        after, closed, self._left_out = -1, False, False
                    else:
                        self._changed.wait_for(
                            lambda: self._is_stopping or (self._is_idle and not self._retrying), self._find_pause()
                        )
                    continue
            page = self._services.get_parts(after, self._ahead)
            parts = [self._complete(one) for one in page.parts]
            with self._changed:
                moved = page.next > after
                after = page.next
                self._seen = max(self._seen, after + 1)
                self._add(parts)
                closed = page.closed
                if moved or closed:
                    idle_since, pause = None, _POLL_SECONDS
                    continue
                now = self._read_clock()
                busy = self._parts or self._running or self._retrying
                idle_since = None if busy else now if idle_since is None else idle_since
                if idle_since is None or now - idle_since < self._linger:
                    self._changed.wait_for(lambda: self._is_stopping, min(pause, self._find_pause()))
                    pause = min(pause * 1.5, _MAX_POLL_SECONDS)
                    continue
            self._wait_for_elements()
            idle_since = None

    def _complete(self, one: IterationPart) -> ElementToRun:
        """Return an element with all its items; a page may end among those of its last one."""
        items = list(one.items)
        while len(items) < one.size:
            page = self._services.get_chunk_items(items[-1].number if items else one.first - 1, part=one.number)
            if not page:
                break
            items += page
        size = sum(len(text) for item in items for text in item.elements if text is not None)
        return ElementToRun(one.number, one.tries, tuple(items), size)

    @property
    def _wants_parts(self) -> bool:
        """Whether more elements are to be read."""
        return len(self._parts) < self._ahead and self._waiting_size < _AHEAD_CHARACTERS

    @property
    def _is_idle(self) -> bool:
        return not (self._parts or self._running)

    def _has_ended(self) -> bool:
        """Whether no element is left for this attempt; `_waits` is set if some are for the next one."""
        if not self._is_idle:
            return False
        if not self._retrying and not self._left_out:
            return True
        delay = self._retrying[0][0] - self._read_clock() if self._retrying else self._delay
        self._waits = delay > _MAX_WAIT_SECONDS and not self._is_last
        return self._waits

    def _find_pause(self) -> float:
        """Return how long to wait for a change, at most until an element is due."""
        due = self._retrying[0][0] - self._read_clock() if self._retrying else _POLL_SECONDS
        return min(max(due, 0.001), _POLL_SECONDS)

    def _wait_for_elements(self) -> None:
        """Give the worker back until the source has more elements, or has closed."""
        with self._changed:
            # What the store knows decides when the attempt goes on.
            self._changed.wait_for(lambda: self._is_stopping or not (self._results or self._sending))
            seen = self._seen
        self._send([], seen, 0)
        self._services.wait_for_elements(lambda: self._is_stopping)

    def _take_due(self) -> None:
        now = self._read_clock()
        due = []
        while self._retrying and self._retrying[0][0] <= now:
            due.append(heapq.heappop(self._retrying)[2])
            self._retrying_size -= due[-1].size
        self._add(due)

    def _add(self, parts: Any) -> None:
        before = len(self._parts)
        self._parts.extend(parts)
        self._waiting_size += sum(one.size for one in parts)
        if len(self._parts) > before:
            self._changed.notify_all()
            self._wake()

    def _take(self) -> ElementToRun | None:
        """Return an element to run; None: there is none now."""
        if self._is_stopping or not self._parts:
            return None
        self._running += 1
        wanted = self._wants_parts
        part = self._parts.popleft()
        self._waiting_size -= part.size
        if self._wants_parts and not wanted:
            self._changed.notify_all()
        return part

    # -- the work ------------------------------------------------------------------------------------------------------

    def _run_threads(self) -> None:
        workers = [
            threading.Thread(target=self._guard, args=(self._work,), name=f"tidemill-element-{number}", daemon=True)
            for number in range(self._concurrency)
        ]
        for worker in workers:
            worker.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._is_stopping)
            if self._is_stopping:
                return
        # A process that has threads left runs no other attempt.
        for worker in workers:
            worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_done or self._is_stopping or bool(self._parts))
                part = self._take()
                if part is None:
                    if self._is_done or self._is_stopping:
                        return
                    continue
            started_us = time.time_ns() // 1_000
            try:
                context, call = self._runner.find_call(part)
                with telling(context):
                    value = call()
                    if inspect.isawaitable(value):
                        value = asyncio.run(_wait(value))
            except BaseException as error:
                self._end(part, started_us, error=error)
            else:
                self._end(part, started_us, value)

    async def _run_async(self) -> None:
        loop = asyncio.get_running_loop()
        more = asyncio.Event()
        workers = [loop.create_task(self._work_async(more)) for _ in range(self._concurrency)]

        def note_end(worker: asyncio.Task[None]) -> None:
            if not worker.cancelled() and worker.exception() is not None:
                self._stop()  # its element would be waited for

        for worker in workers:
            worker.add_done_callback(note_end)

        def look() -> None:
            more.set()
            if self._is_stopping:
                for worker in workers:
                    worker.cancel()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(look)

        self._wake = wake
        look()
        for ended in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _work_async(self, more: asyncio.Event) -> None:
        for number in itertools.count():
            with self._changed:
                part = self._take()
            if part is None:
                if self._is_done or self._is_stopping:
                    return
                more.clear()
                if not (self._parts or self._is_done or self._is_stopping):
                    await more.wait()
                continue
            started_us = time.time_ns() // 1_000
            try:
                context, call = self._runner.find_call(part)
                with telling(context):
                    value = await call()
            except asyncio.CancelledError:
                if self._is_stopping or is_interrupted():
                    raise
                self._end(part, started_us, error=TaskError("the function was cancelled (asyncio.CancelledError)"))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) or (isinstance(error, TaskTimeout) and is_interrupted()):
                    self._stop()
                    raise
                self._end(part, started_us, error=error)
            else:
                self._end(part, started_us, value)
            while not self._has_room():  # noqa: ASYNC110 (another thread makes room)
                await asyncio.sleep(0.005)
            if number % _TURNS == 0:
                await asyncio.sleep(0)  # a function that never waits keeps the loop from all others

    # -- results -------------------------------------------------------------------------------------------------------

    def _end(self, part: ElementToRun, started_us: int, value: Any = None, error: BaseException | None = None) -> None:
        """Note how an element ended."""
        text = None
        if error is None:
            try:
                text = self._encode(part, value)
            except Exception as fault:
                error = fault
        result = self._describe(part, started_us, text, error)
        with self._changed:
            self._running -= 1
            if result.state == "up_for_retry":
                if len(self._retrying) < _MAX_RETRYING and self._retrying_size < _AHEAD_CHARACTERS:
                    self._retrying_size += part.size
                    due = self._read_clock() + self._delay
                    again = ElementToRun(part.number, result.tries, part.items, part.size)
                    heapq.heappush(self._retrying, (due, next(self._order), again))
                else:
                    self._left_out = True
            self._results.append(result)
            self._size += len(text or "")
            if len(self._results) == 1 or self._has_group or self._is_idle:
                self._changed.notify_all()
            if not self._runner.is_async:
                self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        few = len(self._results) < 2 * _MAX_GROUP and self._size < 2 * _MAX_GROUP_BYTES
        return few or self._is_stopping

    def _encode(self, part: ElementToRun, value: Any) -> str | None:
        if value is None or not self._mapped.do_xcom_push:
            return None
        if inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TaskFailed("the function returned a generator; return a list")
        text = encode(value, f"the result of element {part.number}")
        if (size := len(text.encode("utf-8", "replace"))) > _MAX_VALUE_BYTES:
            raise TaskFailed(
                f"the result of element {part.number} has {size:,} bytes; at most {_MAX_VALUE_BYTES:,} are stored; "
                "return a reference"
            )
        return text

    def _describe(self, part: ElementToRun, started_us: int, text: str | None, error: BaseException | None) -> Result:
        if error is None:
            return Result(part.number, "success", part.tries + 1, text, None, started_us)
        if isinstance(error, TaskSkipped):
            _, _, reason = describe_error(error).partition(": ")
            log.info("element %d is skipped: %s", part.number, reason)
            return Result(part.number, "skipped", part.tries + 1, None, _make_storable(reason) or None, started_us)
        if isinstance(error, TaskDeferred):
            error = TaskFailed(
                f"element {part.number} deferred to {type(error.trigger).__name__}, but iterate() runs all elements in "
                "one attempt; use expand(), or an argument like deferrable=False"
            )
        tries = part.tries + 1
        again = not isinstance(error, TaskFailed) and tries < self._element_tries
        log.error("element %d failed in try %d: %s", part.number, tries, describe_error(error), exc_info=_cut(error))
        line = _make_storable(describe_error(error))
        return Result(part.number, "up_for_retry" if again else "failed", tries, None, line, started_us)

    def _keep(self) -> None:
        """Send results in groups, until the attempt ends."""
        told = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._results or self._is_done or self._is_stopping, _LOOK_SECONDS)
                if is_interrupted() and not (self._is_done or self._is_stopping):
                    # The exception may have been caught by an element, or logged by the loop.
                    self._stop()
                results = self._take_results()
                ends = (self._is_done or self._is_stopping) and not results
                seen, running = self._seen, self._running
                self._sending = True
                self._changed.notify_all()
            due = self._read_clock() + _GROUP_SECONDS
            if results or running != told or ends:
                self._send(results, seen, 0 if ends else running)
                told = running
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                if ends:
                    return
                self._changed.wait_for(self._is_group_due, max(0.0, due - self._read_clock()))

    def _take_results(self) -> list[Result]:
        """Return the next group of results, which are sent in one message."""
        found: list[Result] = []
        size = 0
        while self._results and len(found) < _MAX_GROUP and size < _MAX_GROUP_BYTES:
            found.append(self._results.popleft())
            size += len(found[-1].value or "")
        self._size -= size
        return found

    @property
    def _has_group(self) -> bool:
        return len(self._results) >= _MAX_GROUP or self._size >= _MAX_GROUP_BYTES

    def _is_group_due(self) -> bool:
        return self._is_done or self._is_stopping or self._has_group

    def _send(self, results: list[Result], seen: int, running: int) -> None:
        try:
            self._counts = self._services.keep_parts(tuple(results), seen, running)
        except (RemoteError, InvariantError):
            raise
        except TidemillError as error:
            raise TaskFailed(str(error)) from error


def _make_storable(text: str) -> str:
    """Return a text that every database accepts, cut at the limit."""
    return shorten(escape_surrogates(text).replace("\0", "\\x00"), _MAX_ERROR)


async def _wait(value: Any) -> Any:
    return await value


def _cut(error: BaseException) -> Any:
    """Return what to log of an exception, without the frames of this module."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    return type(error), error.with_traceback(frame), frame


def describe_failures(counts: PartOutcome) -> str:
    """Return the error of an attempt whose elements have failed for good."""
    total = counts.success + counts.failed + counts.skipped
    first = f"; element {counts.first_failed}: {counts.error}" if counts.first_failed is not None else ""
    return f"{counts.failed:,} of {format_count(total, 'element')} failed{first}"
