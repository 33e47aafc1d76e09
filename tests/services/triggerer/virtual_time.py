"""An event loop whose time passes only when nothing is left to do: long waits cost nothing, and runs repeat exactly.

What is given to an executor runs at once, on its thread, while the loop stands still. Time stands still, too, while
`busy` is above zero: for work whose answer comes from a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector:
    def __init__(self, loop: VirtualLoop, real: Any) -> None:
        self._loop, self._real = loop, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def select(self, timeout: float | None = None) -> Any:
        # Even what never waits takes time.
        self._loop.passed += 1e-6
        if timeout is not None and timeout <= 0:
            return self._real.select(0)
        if self._loop.busy:
            return self._real.select(None)
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        found = self._real.select(0)
        if not found:
            self._loop.passed += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop.

    Attributes:
        passed: Its time, in seconds.
        busy: How much is going on outside that it has to wait for.
    """

    def __init__(self) -> None:
        self.passed = 0.0
        self.busy = 0
        super().__init__()
        self._selector = _Selector(self, self._selector)

    def time(self) -> float:
        return self.passed

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        answer: asyncio.Future[T] = self.create_future()
        try:
            answer.set_result(executor.submit(func, *args).result() if executor is not None else func(*args))
        except BaseException as error:
            answer.set_exception(error)
        return answer


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run something to its end in a loop of its own; what is left running after that is left alone."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
