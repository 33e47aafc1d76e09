"""Passes the values that a generator task yields on to the store, while the generator goes on.

A thread sends what has been yielded, once in 50 ms or as soon as 1,000 values or 4 MiB wait: values of a fast generator
travel in groups, and a value of a slow one is sent at once. With as many values waiting, the generator waits, too.

If enough values are stored that no element has taken yet, the generator waits at its next `yield`, and its attempt
gives up its slots of pool and worker until it may go on.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Final

from tidemill.core.errors import InvariantError, RemoteError, TidemillError
from tidemill.core.wording import format_count
from tidemill.dags.attempt.task_services import TaskServices
from tidemill.dags.exceptions import TaskFailed
from tidemill.runtime.json.codec import encode

_GROUP_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 0.2
_MAX_WAITING: Final = 1_000
_MAX_WAITING_BYTES: Final = 4 << 20
#: The limit of the store, which also refuses larger values, but a much larger one does not even reach it.
_MAX_VALUE_BYTES: Final = 1 << 20


def emit_all(results: Generator[Any, Any, Any] | AsyncGenerator[Any, Any], services: TaskServices) -> None:
    """Run a generator to its end, or until no map wants more of its values, and store each value as an element.

    Raises:
        TaskFailed: The store refuses a value, for example because the task yielded another at its index before; or an
            earlier try yielded more values.
        EncodingError: A value cannot be serialized; the message has its index.
        BaseException: An exception of the generator; the values before it are stored.
    """
    emitter = _Emitter(services)
    try:
        if inspect.isasyncgen(results):
            asyncio.run(_iterate_async(results, emitter))
        else:
            _iterate(results, emitter)
    except (Exception, SystemExit):  # the second one is from the function, too: `sys.exit()`
        emitter.finish(raises=False)
        raise
    except BaseException:
        emitter.abandon()
        raise
    emitter.finish()


def _iterate(results: Any, emitter: _Emitter) -> None:
    try:
        for value in results:
            while not emitter.has_room:
                emitter.wait_for_room()
            if emitter.is_ended:
                return
            emitter.put(value)
    finally:
        results.close()


async def _iterate_async(results: Any, emitter: _Emitter) -> None:
    try:
        async for value in results:
            while not emitter.has_room:
                await asyncio.to_thread(emitter.wait_for_room)
            if emitter.is_ended:
                return
            emitter.put(value)
    finally:
        await results.aclose()


class _Emitter:
    """Sends values to the store in a thread.

    Args:
        services: The access to the store.
        read_clock: Returns the seconds of a clock that never goes back.
    """

    def __init__(self, services: TaskServices, read_clock: Callable[[], float] = time.monotonic) -> None:
        self._services = services
        self._read_clock = read_clock
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._waiting_bytes = 0
        #: The index of the next value to put, and of the next one to send.
        self._put = self._sent = 0
        #: The number of values that the store has, including those of earlier tries.
        self._stored = 0
        self._is_finishing = False
        #: Whether enough values are stored ahead, and whether the generator waits at a `yield`.
        self._is_full = self._is_stalled = False
        #: Nothing more is sent: the store has refused a value, or wants no more.
        self.is_ended = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def put(self, value: Any) -> None:
        """Add the next value."""
        text = encode(value, f"element {self._put}")
        if len(text) > _MAX_VALUE_BYTES:
            raise TaskFailed(
                f"element {self._put} has {len(text):,} characters; at most {_MAX_VALUE_BYTES:,} bytes are stored; "
                "yield a reference"
            )
        with self._changed:
            self._waiting.append(text)
            self._waiting_bytes += len(text)
            self._put += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="tidemill-emit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether the next value may be added."""
        few = len(self._waiting) < _MAX_WAITING and self._waiting_bytes < _MAX_WAITING_BYTES
        return self.is_ended or (few and not self._is_full)

    def wait_for_room(self) -> None:
        """Wait until the next value may be added, for a moment: a signal that arrives just before a wait does not
        interrupt it, and is noticed after it.
        """
        with self._changed:
            self._is_stalled = True
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self.has_room, _LOOK_SECONDS)
            finally:
                self._is_stalled = False

    def finish(self, *, raises: bool = True) -> None:
        """Wait until all values are stored.

        Args:
            raises: Whether to raise the error of a value, or an error because values are missing at the end.

        Raises:
            TaskFailed: The store refused a value, or has more values.
        """
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if not raises:
            return
        if self._error is not None:
            raise self._error
        if self._thread is None:
            # This try yielded nothing, but an earlier one may have.
            answer = self._services.emit(0, ())
            self._stored, self.is_ended = answer.total, not answer.wanted
        if not self.is_ended and self._stored > self._sent:
            raise TaskFailed(
                f"the generator ended after {format_count(self._sent, 'element')}, but an earlier try yielded "
                f"{self._stored:,}; make it yield the same elements again, or clear it to start over"
            )

    def abandon(self) -> None:
        """Send nothing more; a call under way is waited for, because the attempt's report uses the same connection."""
        with self._changed:
            self.is_ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _send(self) -> None:
        while (values := self._take()) is not None:
            due = self._read_clock() + _GROUP_SECONDS
            error, wanted, full = self._emit(values)
            with self._changed:
                self._sent += len(values)
                if error is not None or not wanted:
                    self._error, self.is_ended = error, True
                self._is_full = full
                self._changed.notify_all()
                if not full:
                    self._changed.wait_for(self._is_due, due - self._read_clock())
            if full:
                self._wait_for_place()

    def _wait_for_place(self) -> None:
        """Wait until the generator waits, too, and then until its attempt may go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stalled or self._is_over)
            over = self._is_over
        error = None
        if not over:
            try:
                self._services.wait_for_place(lambda: self._is_over)
            except Exception as caught:
                error = caught
        with self._changed:
            self._is_full = False
            if error is not None:
                self._error, self.is_ended = error, True
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._is_finishing or self.is_ended

    def _is_due(self) -> bool:
        """Return whether the next group is sent without waiting for more values."""
        return self._is_finishing or not self.has_room

    def _take(self) -> tuple[str, ...] | None:
        """Wait for values, and return all of them; None: there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_finishing or self.is_ended)
            if self.is_ended or not self._waiting:
                return None
            values = tuple(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
            return values

    def _emit(self, values: tuple[str, ...]) -> tuple[Exception | None, bool, bool]:
        """Send values; return an error, whether more are wanted, and whether the generator has to wait."""
        try:
            answer = self._services.emit(self._sent, values)
        except (RemoteError, InvariantError) as error:
            return error, False, False
        except TidemillError as error:
            # The store refuses the value again whenever the task yields it.
            refusal = TaskFailed(str(error))
            refusal.__cause__ = error
            return refusal, False, False
        except Exception as error:
            return error, False, False
        self._stored = answer.total
        return None, answer.wanted, answer.wanted and answer.full
