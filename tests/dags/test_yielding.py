"""Tasks that yield."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.dags.attempts import Services, Stored, attempt
from tests.until import wait_until

from tidemill.core.errors import InvariantError, RemoteError, TidemillError
from tidemill.core.tasks.endings import Failure, Success
from tidemill.dags import DAG, TaskTimeout, task
from tidemill.dags.attempt.results import AttemptResult
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger


def run(function: Callable[..., Any], services: Services | None = None) -> tuple[AttemptResult, list[str]]:
    """Run a generator task; return its result, and what it emitted, which has no gaps."""
    services = services or Services()
    with DAG("d") as dag:
        task(task_id="t")(function)()
    result = attempt(dag, "t", services)
    emitted: list[str] = []
    for first, values in services.emitted:
        assert first == len(emitted)
        emitted += values
    return result, emitted


def count(end: int) -> Callable[[], Any]:
    def generate() -> Any:
        yield from range(end)

    return generate


def test_each_value_is_stored_in_order_and_none_is_returned() -> None:
    result, emitted = run(count(10_000))
    assert result == AttemptResult(Success())
    assert emitted == [str(number) for number in range(10_000)]


def test_nothing_is_stored_for_nothing() -> None:
    assert run(count(0)) == (AttemptResult(Success()), [])


def test_async_generators_yield_too() -> None:
    async def generate() -> Any:
        for number in range(3_000):
            yield number

    result, emitted = run(generate)
    assert (result.ending, len(emitted)) == (Success(), 3_000)


def test_the_generator_gets_arguments_and_context() -> None:
    def generate(ti: Any, **context: Any) -> Any:
        yield ti.task_id
        yield context["run_id"]

    assert run(generate)[1] == ['"t"', '"run"']


def test_a_slow_generator_keeps_no_value_back() -> None:
    services = Services()
    stored: list[int] = []

    def count_emitted() -> int:
        return sum(len(values) for _, values in services.emitted)

    def generate() -> Any:
        for number in range(3):
            yield number
            wait_until(lambda: count_emitted() > len(stored), 10)
            stored.append(number)

    assert run(generate, services)[0].ending == Success()
    assert stored == [0, 1, 2]


def test_values_of_a_fast_generator_travel_in_groups() -> None:
    def generate() -> Any:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            yield 1
            time.sleep(0.001)

    services = Services()
    run(generate, services)
    assert 2 <= len(services.emitted) <= 13


def test_a_generator_that_is_faster_than_the_groups_does_not_wait_for_them() -> None:
    services = Services()
    began = time.monotonic()
    run(count(200_000), services)
    assert time.monotonic() - began < len(services.emitted) * 0.05


class Refusing(Services):
    def __init__(self, error: Exception | None, at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def emit(self, first: int, values: tuple[str, ...]) -> Stored:
        super().emit(first, values)
        if first + len(values) <= self.at:
            return Stored(first + len(values))
        if self.error is not None:
            raise self.error
        return Stored(first + len(values), wanted=False)


@pytest.mark.parametrize(
    ("error", "may_retry"),
    [
        (TidemillError("element 5 differs"), False),
        (RemoteError("the store is away"), True),
        (InvariantError("a fault of the store"), True),
        (ValueError("bug"), True),
    ],
)
def test_a_refusal_of_the_store_closes_the_generator_and_is_final(error: Exception, may_retry: bool) -> None:
    closed = threading.Event()

    def generate() -> Any:
        try:
            while True:
                yield 1
                time.sleep(0.001)
        finally:
            closed.set()

    result, _ = run(generate, Refusing(error, 5))
    assert isinstance(result.ending, Failure)
    assert str(error) in result.ending.error
    assert result.ending.may_retry is may_retry
    assert closed.is_set()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_of_which_nobody_wants_more_is_closed_and_succeeds(is_async: bool) -> None:
    closed = threading.Event()

    def generate() -> Any:
        try:
            while True:
                yield 1
                time.sleep(0.001)
        finally:
            closed.set()

    async def generate_async() -> Any:
        for value in generate():
            yield value

    result, _ = run(generate_async if is_async else generate, Refusing(None, 5))
    assert result.ending == Success()
    assert closed.is_set() or is_async


def test_a_refusal_of_the_last_value_fails_the_attempt() -> None:
    result, _ = run(count(3), Refusing(TidemillError("element 2 differs"), 2))
    assert result.ending == Failure("TaskFailed: element 2 differs", may_retry=False)


class Retried(Services):
    """A store in which an earlier try has left values."""

    def __init__(self, left: int, wanted: bool = True) -> None:
        super().__init__()
        self.left, self.wanted = left, wanted

    def emit(self, first: int, values: tuple[str, ...]) -> Stored:
        super().emit(first, values)
        return Stored(max(self.left, first + len(values)), self.wanted)


@pytest.mark.parametrize("yields", [0, 1])
def test_a_try_that_yields_fewer_values_than_an_earlier_one_is_a_final_failure(yields: int) -> None:
    result, _ = run(count(yields), Retried(3))
    assert isinstance(result.ending, Failure)
    assert f"ended after {yields} element" in result.ending.error
    assert "an earlier try yielded 3;" in result.ending.error
    assert result.ending.may_retry is False
    assert run(count(yields), Retried(3, wanted=False))[0].ending == Success(), "no map wanted more"
    assert run(count(3), Retried(3))[0].ending == Success()


def test_a_generator_that_fails_before_it_yielded_as_much_as_before_is_retried() -> None:
    def generate() -> Any:
        yield 1
        raise ValueError("broken")

    result, _ = run(generate, Retried(3))
    assert isinstance(result.ending, Failure)
    assert (result.ending.error, result.ending.may_retry) == ("ValueError: broken", True)


def test_the_generator_waits_for_a_slow_store() -> None:
    class Slow(Services):
        ahead = 0

        def emit(self, first: int, values: tuple[str, ...]) -> Stored:
            time.sleep(0.1)
            self.ahead = max(self.ahead, yielded[-1] - first)
            return super().emit(first, values)

    yielded = [0]

    def generate() -> Any:
        for number in range(5_000):
            yielded.append(number)
            yield number

    services = Slow()
    assert len(run(generate, services)[1]) == 5_000
    assert services.ahead <= 2_001


class Full(Services):
    """A store that has enough whenever it has stored this many values since the last wait."""

    def __init__(self, most: int = 2_000) -> None:
        super().__init__()
        self.most = most
        self.waits: list[int] = []
        self.last = 0
        self.waiting, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def emit(self, first: int, values: tuple[str, ...]) -> Stored:
        super().emit(first, values)
        total = first + len(values)
        return Stored(total, full=total - self.last >= self.most)

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.last = sum(len(values) for _, values in self.emitted)
        self.waits.append(self.last)
        self.waiting.set()
        while not self.may_go_on.wait(0.01) and not is_over():
            pass


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_waits_at_its_yield_while_enough_is_stored(is_async: bool) -> None:
    services = Full()
    services.may_go_on.clear()
    yielded: list[int] = []

    def generate() -> Any:
        for number in range(20_000):
            yielded.append(number)
            yield number

    async def generate_async() -> Any:
        for value in generate():
            yield value

    def look() -> None:
        assert services.waiting.wait(10)
        before = len(yielded)
        time.sleep(0.1)
        # It holds one value in its hand, and at most a group waits to be sent.
        assert before == len(yielded) <= services.last + 1_001
        services.may_go_on.set()

    looking = threading.Thread(target=look)
    looking.start()
    result, emitted = run(generate_async if is_async else generate, services)
    looking.join()
    assert (result.ending, len(emitted)) == (Success(), 20_000)
    assert len(services.waits) >= 5
    assert all(after - before <= 3_000 for before, after in itertools.pairwise(services.waits))


def test_a_generator_that_does_other_things_keeps_its_place_until_its_next_yield() -> None:
    services = Full(most=1)

    def generate() -> Any:
        yield 1
        wait_until(lambda: bool(services.emitted), 10)
        time.sleep(0.1)
        assert not services.waits
        yield 2
        assert services.waits == [1]

    assert run(generate, services)[0].ending == Success()
    assert services.waits == [1], "after its last value it ends"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_that_waits_is_interrupted(is_async: bool) -> None:
    services = Full(most=1)
    services.may_go_on.clear()
    closed = threading.Event()

    def generate() -> Any:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    async def generate_async() -> Any:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    def interrupt() -> None:
        services.waiting.wait(10)
        signal.pthread_kill(main, signal.SIGALRM)

    def stop(number: int, frame: Any) -> None:
        raise TaskTimeout("interrupted")

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGALRM, stop)
    thread = threading.Thread(target=interrupt)
    began = time.monotonic()
    try:
        thread.start()
        result, _ = run(generate_async if is_async else generate, services)
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join()
    assert isinstance(result.ending, Failure)
    assert "interrupted" in result.ending.error
    assert closed.is_set()
    assert time.monotonic() - began < 5


def test_an_error_of_the_wait_ends_the_attempt() -> None:
    class Gone(Full):
        def wait_for_place(self, is_over: Callable[[], bool]) -> None:
            raise RuntimeError("the worker is gone")

    result, _ = run(count(100_000), Gone())
    assert isinstance(result.ending, Failure)
    assert "the worker is gone" in result.ending.error


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("broken"), "ValueError: broken"), (SystemExit(3), "the task called sys.exit(3)")],
    ids=["error", "exit"],
)
def test_an_exception_keeps_what_was_yielded(error: BaseException, text: str) -> None:
    def generate() -> Any:
        yield 1
        yield 2
        raise error

    result, emitted = run(generate)
    assert isinstance(result.ending, Failure)
    assert (result.ending.error, emitted) == (text, ["1", "2"])


def test_a_value_that_cannot_be_encoded_is_named_by_its_index() -> None:
    def generate() -> Any:
        yield 1
        yield {"a": object()}

    result, emitted = run(generate)
    assert isinstance(result.ending, Failure)
    assert "element 1['a'] is of type builtins.object, which cannot be encoded" in result.ending.error
    assert emitted == ["1"]


def test_a_value_that_is_too_large_is_a_final_failure() -> None:
    def generate() -> Any:
        yield 1
        yield "x" * (1 << 20)

    result, emitted = run(generate)
    assert isinstance(result.ending, Failure)
    assert "element 1 has 1,048,578 characters" in result.ending.error
    assert (result.ending.may_retry, emitted) == (False, ["1"])


def test_a_timeout_closes_the_generator_and_ends_the_thread() -> None:
    def generate() -> Any:
        yield 1
        raise TaskTimeout("too long")

    result, _ = run(generate)
    assert isinstance(result.ending, Failure)
    assert "tidemill-emit" not in [thread.name for thread in threading.enumerate()]


def test_a_generator_cannot_defer() -> None:
    def generate(task: Any) -> Any:
        yield 1
        task.defer(trigger=TimeDeltaTrigger(1), method_name="resumed")

    result, _ = run(generate)
    assert isinstance(result.ending, Failure)
    assert "a @task function cannot defer" in result.ending.error
