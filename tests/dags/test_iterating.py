"""Tasks whose attempt runs all elements: what their file says, and their attempts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from tests.dags.attempts import ChunkItem, Services, attempt

from tidemill.core.errors import TidemillError
from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss, Skip, Success
from tidemill.core.tasks.structure import ChunkStructure, MapSource
from tidemill.dags import (
    DAG,
    BaseOperator,
    BashOperator,
    BranchPythonOperator,
    DagError,
    TaskFailed,
    TaskSkipped,
    get_current_context,
    task,
    task_group,
)
from tidemill.dags.attempt.current import note_interrupted
from tidemill.dags.exceptions import TaskTimeout
from tidemill.dags.execution import element_feeder, result_keeper
from tidemill.dags.execution.elements import PlaceLeft, Progress
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure
from tidemill.runtime.json.codec import decode, encode


@dataclass(frozen=True)
class Page:
    parts: list[Any]
    next: int
    closed: bool
    leaves: bool = False


@dataclass(frozen=True)
class Counts:
    success: int
    failed: int
    skipped: int
    first_failed: int | None
    error: str | None
    leaves: bool = False


@dataclass(frozen=True)
class ToRun:
    number: int
    tries: int
    first: int
    size: int
    items: list[ChunkItem]


@dataclass
class Parts:
    """Elements in memory; `values` may grow while the source is open."""

    values: list[Any]
    closed: bool = True
    chunk: int = 1
    kept: dict[int, Any] = field(default_factory=dict)
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    refusal: Exception | None = None
    waits: int = 0
    #: Whether the worker stops.
    leaves: bool = False
    on_wait: Callable[[], None] | None = None

    def get_parts(self, after: int, limit: int) -> Page:
        number = len(self.values) // self.chunk if not self.closed else -(-len(self.values) // self.chunk)
        wanted = [
            one for one in range(after + 1, number) if one not in self.kept or self.kept[one].state == "up_for_retry"
        ][: min(limit, 100)]
        found = []
        for one in wanted:
            items = range(one * self.chunk, min((one + 1) * self.chunk, len(self.values)))
            tries = self.kept[one].tries if one in self.kept else 0
            texts = [ChunkItem(item, (item,), (encode(self.values[item]),)) for item in items]
            found.append(ToRun(one, tries, items.start, len(items), texts))
        last = wanted[-1] if len(wanted) == min(limit, 100) else number - 1
        return Page(found, last, self.closed and last + 1 >= number, self.leaves)

    def keep_parts(self, results: Any, seen: int, running: int) -> Counts:
        if self.refusal is not None:
            raise self.refusal
        self.groups.append((len(results), seen, running))
        for one in results:
            assert one.number not in self.kept or self.kept[one.number].state == "up_for_retry"
            self.kept[one.number] = one
        states = [one.state for one in self.kept.values()]
        bad = sorted(number for number, one in self.kept.items() if one.state == "failed")
        error = self.kept[bad[0]].error if bad else None
        counted = [states.count(name) for name in ("success", "failed", "skipped")]
        return Counts(*counted, bad[0] if bad else None, error, self.leaves)

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        self.waits += 1
        if self.on_wait is None:
            raise PlaceLeft
        self.on_wait()

    @property
    def results(self) -> dict[int, Any]:
        return {number: decode(one.value) for number, one in sorted(self.kept.items()) if one.value is not None}


@task
def rows() -> list[Any]:
    return []


@task
def stream() -> Iterator[int]:
    yield 1


def run(dag: DAG, task_id: str, parts: Parts, **claim: Any) -> AttemptEnding:
    return attempt(dag, task_id, Services(parts=parts), map_index=0, **claim).ending


@task
async def double(x: int, plus: int = 0) -> int:
    await asyncio.sleep(0)
    return 2 * x + plus


def test_async_functions_run_on_one_loop_so_many_at_a_time() -> None:
    threads: set[str] = set()
    now = [0, 0]

    @task(task_concurrency=3)
    async def count(x: int) -> int:
        now[0] += 1
        now[1] = max(now)
        threads.add(threading.current_thread().name)
        await asyncio.sleep(0.001)
        now[0] -= 1
        return x

    with DAG("d") as dag:
        count.iterate(x=rows())
    parts = Parts(list(range(20)))
    assert run(dag, "count", parts) == Success()
    assert parts.results == {number: number for number in range(20)}
    assert threads == {"MainThread"}
    assert now[1] == 3
    assert parts.groups[-1] == (0, 20, 0)


def test_other_functions_run_in_threads() -> None:
    both = threading.Barrier(2, timeout=5)

    @task(task_concurrency=2)
    def wait(x: int) -> str:
        both.wait()
        return threading.current_thread().name

    with DAG("d") as dag:
        wait.iterate(x=rows())
    parts = Parts(list(range(4)))
    assert run(dag, "wait", parts) == Success()
    assert len(set(parts.results.values())) == 2
    assert [one.name for one in threading.enumerate() if one.name.startswith("tidemill-")] == []


def test_an_attempt_runs_only_what_is_left() -> None:
    with DAG("d") as dag:
        double.partial(plus=1).iterate(x=rows())
    parts = Parts([1, 2, 3])
    run(dag, "double", parts)
    del parts.kept[1]
    before = dict(parts.kept)
    assert run(dag, "double", parts) == Success()
    assert {number: parts.kept[number] for number in before} == before
    assert parts.results == {0: 3, 1: 5, 2: 7}


def test_elements_have_contexts_and_templates_of_their_own() -> None:
    @task(task_concurrency=2)
    def tell(x: str, shared: str, ti: Any) -> list[Any]:
        return [x, shared, ti.map_index, get_current_context()["ti"].map_index]

    with DAG("d") as dag:
        tell.partial(shared="{{ ti.map_index }}").iterate(x=["{{ run_id }}", "b"])
        tell.override(task_id="data").partial(shared="s").iterate(x=rows())
    parts = Parts(["ignored", "b"])
    assert run(dag, "tell", parts) == Success()
    assert parts.results == {0: ["run", "0", 0, 0], 1: ["b", "1", 1, 1]}
    # Values of other tasks are data.
    parts = Parts(["{{ run_id }}"])
    assert run(dag, "data", parts) == Success()
    assert parts.results == {0: ["{{ run_id }}", "s", 0, 0]}


def test_dicts_of_arguments_and_several_arguments_are_iterated() -> None:
    with DAG("d") as dag:
        double.iterate_kwargs(rows())
    parts = Parts([{"x": 1}, {"x": 2, "plus": 5}])
    assert run(dag, "double", parts) == Success()
    assert parts.results == {0: 2, 1: 9}


def test_operators_run_in_threads() -> None:
    class Add(BaseOperator):
        template_fields = ("x",)

        def __init__(self, *, x: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.x = x

        def execute(self, context: Any) -> Any:
            return [self.x, context["ti"].map_index]

    with DAG("d") as dag:
        Add.partial(task_id="add", task_concurrency=2).iterate(x=["{{ run_id }}", "b"])
    parts = Parts(["a", "b"])
    assert run(dag, "add", parts) == Success()
    assert parts.results == {0: ["run", 0], 1: ["b", 1]}


def test_chunks_are_given_as_lists() -> None:
    @task
    async def join(values: list[int]) -> int:
        return sum(values)

    with DAG("d") as dag:
        join.chunk(3).iterate(values=rows())
    parts = Parts([1, 2, 3, 4], chunk=3)
    assert run(dag, "join", parts) == Success()
    assert parts.results == {0: 6, 1: 4}


def test_an_element_that_fails_is_tried_again_in_the_same_attempt() -> None:
    tries: dict[int, int] = {}

    @task(retries=2, retry_delay=timedelta(milliseconds=1))
    async def flaky(x: int) -> int:
        tries[x] = tries.get(x, 0) + 1
        if tries[x] <= x:
            raise ValueError(f"no {x}")
        return x

    with DAG("d") as dag:
        flaky.iterate(x=rows())
    parts = Parts([0, 1, 2, 3])
    ending = run(dag, "flaky", parts)
    assert isinstance(ending, Failure)
    assert not ending.may_retry
    assert tries == {0: 1, 1: 2, 2: 3, 3: 3}
    assert {number: (one.state, one.tries) for number, one in sorted(parts.kept.items())} == {
        0: ("success", 1),
        1: ("success", 2),
        2: ("success", 3),
        3: ("failed", 3),
    }


def test_elements_that_wait_for_long_are_left_to_the_next_attempt() -> None:
    @task(retries=1, retry_delay=timedelta(minutes=5))
    async def fail(x: int) -> int:
        if x == 1:
            raise ValueError("no")
        return x

    with DAG("d") as dag:
        fail.iterate(x=rows())
    parts = Parts([0, 1])
    ending = run(dag, "fail", parts, try_number=1, max_tries=2)
    assert isinstance(ending, Failure)
    assert ending.may_retry
    assert parts.kept[1].state == "up_for_retry"
    ending = run(dag, "fail", parts, try_number=2, max_tries=2)
    assert isinstance(ending, Failure)
    assert not ending.may_retry
    assert (parts.kept[1].state, parts.kept[1].tries) == ("failed", 2)


def test_failures_skips_and_deferrals_end_their_element_alone() -> None:
    class Defers(BaseOperator):
        def __init__(self, *, x: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.x = x

        def execute(self, context: Any) -> Any:
            if self.x == 0:
                self.defer(trigger=object(), method_name="execute")
            if self.x == 1:
                raise TaskSkipped("not today")
            if self.x == 2:
                raise TaskFailed("never")
            if self.x == 3:
                return object()
            return self.x

    with DAG("d") as dag:
        Defers.partial(task_id="t", retries=3).iterate(x=rows())
    parts = Parts([0, 1, 2, 3, 4])
    ending = run(dag, "t", parts)
    assert isinstance(ending, Failure)
    states = {number: one.state for number, one in sorted(parts.kept.items())}
    assert states[0] == states[2] == "failed"
    assert (states[1], states[4]) == ("skipped", "success")


def test_a_task_all_of_whose_elements_are_skipped_is_skipped() -> None:
    @task
    def skip(x: int) -> None:
        raise TaskSkipped("not today")

    with DAG("d") as dag:
        skip.iterate(x=rows())
    assert isinstance(run(dag, "skip", Parts([1, 2])), Skip)


def test_an_open_source_is_waited_for_without_the_worker() -> None:
    class Quick(BaseOperator):
        stream_linger = 0.01

        def __init__(self, *, x: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.x = x

        def execute(self, context: Any) -> int:
            return self.x

    with DAG("d") as dag:
        Quick.partial(task_id="t").iterate(x=stream())
    parts = Parts([1, 2], closed=False)

    def go_on() -> None:
        # What is known is stored before the wait.
        assert parts.results == {0: 1, 1: 2}
        assert parts.groups[-1] == (0, 2, 0)
        parts.values.append(3)
        parts.closed = True

    parts.on_wait = go_on
    assert run(dag, "t", parts) == Success()
    assert parts.waits == 1
    assert parts.results == {0: 1, 1: 2, 2: 3}
    # Where an attempt has no process to keep, it ends.
    assert isinstance(run(dag, "t", Parts([1], closed=False)), Loss)


def test_an_open_source_is_waited_for_without_the_worker_while_a_retry_is_far_away() -> None:
    class Quick(BaseOperator):
        stream_linger = 0.01

        def __init__(self, *, x: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.x = x

        def execute(self, context: Any) -> int:
            if self.x == 1:
                raise ValueError("no")
            return self.x

    with DAG("d") as dag:
        Quick.partial(task_id="t", retries=1, retry_delay=timedelta(minutes=5)).iterate(x=stream())
    parts = Parts([1, 2], closed=False)

    def go_on() -> None:
        assert parts.kept[0].state == "up_for_retry"
        parts.closed = True

    parts.on_wait = go_on
    ending = run(dag, "t", parts, try_number=1, max_tries=2)
    assert isinstance(ending, Failure)
    assert ending.may_retry
    assert parts.waits == 1


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_attempt_whose_worker_stops_takes_no_more_elements(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, closed: bool
) -> None:
    parts = Parts(list(range(50)), closed=closed)
    noted = threading.Event()
    leave = Progress.leave

    def note(progress: Progress) -> None:
        leave(progress)
        noted.set()

    monkeypatch.setattr(Progress, "leave", note)

    @task(task_concurrency=2)
    async def add(x: int) -> int:
        parts.leaves = parts.leaves or x == 1
        while x > 1 and not noted.is_set():
            await asyncio.sleep(0.001)
        return x

    @task(task_concurrency=2)
    def add_in_thread(x: int) -> int:
        parts.leaves = parts.leaves or x == 1
        assert x <= 1 or noted.wait(30)
        return x

    with DAG("d") as dag:
        (add if is_async else add_in_thread).override(task_id="t").iterate(x=rows() if closed else stream())
    assert run(dag, "t", parts) == Loss(is_return=True)
    # Those that ran have ended, and are stored.
    assert parts.results == {number: number for number in range(len(parts.kept))}
    assert 2 <= len(parts.kept) <= 4


def test_an_attempt_whose_results_are_refused_ends() -> None:
    with DAG("d") as dag:
        double.iterate(x=rows())
    ending = run(dag, "double", Parts([1], refusal=TidemillError("replaced")))
    assert isinstance(ending, Failure)
    assert "replaced" in ending.error


def test_results_are_stored_soon_while_elements_run() -> None:
    parts = Parts([0, 1])
    seen: list[bool] = []

    @task(task_concurrency=1)
    def look(x: int) -> int:
        deadline = time.monotonic() + 5
        while x == 1 and 0 not in parts.kept and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(0 in parts.kept)
        return x

    with DAG("d") as dag:
        look.iterate(x=rows())
    assert run(dag, "look", parts) == Success()
    assert seen == [False, True]


@contextlib.contextmanager
def interrupted(when: threading.Event) -> Iterator[None]:
    """Interrupt the attempt in the main thread once an event is set, as a worker does."""

    def interrupt(number: int, frame: Any) -> None:
        note_interrupted()
        raise TaskTimeout("the attempt is over")

    def send() -> None:
        if when.wait(5):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_coroutines_that_are_interrupted_have_not_failed() -> None:
    began = threading.Event()

    @task(task_concurrency=2)
    async def hang(x: int) -> int:
        if x >= 2:
            began.set()
            await asyncio.sleep(5)
        return x

    with DAG("d") as dag:
        hang.iterate(x=rows())
    parts = Parts(list(range(6)))
    with interrupted(began):
        ending = run(dag, "hang", parts)
    assert isinstance(ending, Failure)
    assert parts.results == {0: 0, 1: 1}
    assert parts.kept.keys() == {0, 1}


def test_an_attempt_ends_although_an_element_ignores_the_interruption() -> None:
    began = threading.Event()

    @task(task_concurrency=1)
    async def ignore(x: int) -> int:
        if x == 0:
            began.set()
            with contextlib.suppress(BaseException):
                time.sleep(5)
        await asyncio.sleep(0.01)
        return x

    with DAG("d") as dag:
        ignore.iterate(x=rows())
    parts = Parts(list(range(1_000)))
    with interrupted(began):
        ending = run(dag, "ignore", parts)
    assert isinstance(ending, Failure)
    assert 0 < len(parts.kept) < 500
    assert {one.state for one in parts.kept.values()} == {"success"}


def test_operators_of_an_attempt_that_is_interrupted_are_killed() -> None:
    began, over = threading.Event(), threading.Event()
    killed: list[int] = []
    both = threading.Barrier(2, action=began.set, timeout=5)

    class Wait(BaseOperator):
        def __init__(self, *, x: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.x = x

        def execute(self, context: Any) -> None:
            both.wait()
            over.wait(5)

        def on_kill(self) -> None:
            killed.append(self.x)

    with DAG("d") as dag:
        Wait.partial(task_id="t", task_concurrency=2).iterate(x=rows())
    parts = Parts([0, 1, 2])
    with interrupted(began):
        ending = run(dag, "t", parts)
    over.set()
    assert isinstance(ending, Failure)
    assert sorted(killed) == [0, 1]
    assert parts.kept == {}


def test_many_large_results_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_keeper, "_MAX_GROUP_BYTES", 100)

    @task(task_concurrency=40)
    async def produce(x: int) -> str:
        await asyncio.sleep(0.01)
        return "x" * 50

    with DAG("d") as dag:
        produce.iterate(x=rows())
    parts = Parts(list(range(40)))
    assert run(dag, "produce", parts) == Success()
    assert len(parts.results) == 40
    assert max(number for number, _, _ in parts.groups) <= 2


def test_large_items_are_not_read_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_feeder, "_AHEAD_CHARACTERS", 1_000)
    asked: list[int] = []

    class Counted(Parts):
        def get_parts(self, after: int, limit: int) -> Page:
            asked.append(after)
            return super().get_parts(after, limit)

    @task(task_concurrency=1)
    def look(x: str, ti: Any) -> int:
        if ti.map_index == 0:
            time.sleep(0.2)
        return len(asked)

    with DAG("d") as dag:
        look.iterate(x=rows())
    parts = Counted(["x" * 100] * 300)
    assert run(dag, "look", parts) == Success()
    assert parts.results[0] == 1
    assert len(parts.results) == 300


def test_elements_that_the_store_alone_knows_run_again_once_their_results_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(element_feeder, "_MAX_RETRYING", 1)
    calls: Counter[int] = Counter()

    class Slow(Parts):
        def keep_parts(self, results: Any, seen: int, running: int) -> Counts:
            time.sleep(0.05)
            return super().keep_parts(results, seen, running)

    @task(retries=1, retry_delay=timedelta(milliseconds=1), task_concurrency=2)
    async def flaky(x: int) -> int:
        calls[x] += 1
        if x < 5 and calls[x] == 1:
            raise ValueError("no")
        return x

    with DAG("d") as dag:
        flaky.iterate(x=rows())
    parts = Slow(list(range(10)))
    assert run(dag, "flaky", parts) == Success()
    assert [calls[number] for number in range(10)] == [2] * 5 + [1] * 5


def test_the_reason_of_a_skip_can_be_stored() -> None:
    @task
    def skip(x: int) -> None:
        raise TaskSkipped("a\0b" + "c" * 10_000)

    with DAG("d") as dag:
        skip.iterate(x=rows())
    parts = Parts([1])
    assert isinstance(run(dag, "skip", parts), Skip)
    assert parts.kept[0].error.startswith("a\\x00b")
    assert len(parts.kept[0].error) < 1_100


def test_the_structure_says_that_one_attempt_runs_all_elements() -> None:
    with DAG("d") as dag:
        results = double.chunk(2, max_wait=1).iterate(x=stream())
        double.override(task_id="after").expand(x=results)
    structure = read_structure(serialize_dag(dag))
    assert structure == build_structure(dag)
    found = {one.id: one for one in structure.tasks}
    mapped = found["double"].mapped
    assert mapped is not None
    assert (mapped.iterated, mapped.chunk) == (True, ChunkStructure(2, 1_000_000))
    after = found["after"]
    assert after.mapped is not None
    assert after.mapped.factors == (MapSource("results", "double", "return_value"),)
    assert after.follows is None


class Streams(BaseOperator):
    def handle_trigger_events(self, events: Any, context: Any) -> None:
        return


@pytest.mark.parametrize(
    "define",
    [
        lambda: task_group(lambda x: None, group_id="g").iterate(x=[1]),
        lambda: task_group(lambda x: None, group_id="g").iterate_kwargs([{"x": 1}]),
        lambda: stream.iterate(x=[1]),
        lambda: double.iterate(x=[1])["key"],
        lambda: double.iterate(),
        lambda: double.iterate([1]),
        lambda: double.iterate(y=[1]),
        lambda: double.override(task_concurrency=0).iterate(x=[1]),
        lambda: double.override(task_concurrency=1_001).iterate(x=[1]),
        lambda: double.override(task_concurrency=2).expand(x=[1]),
        lambda: double.partial(max_outstanding=2).iterate(x=[1]),
        lambda: double.chunk(2).iterate_kwargs([{"x": 1}]),
        lambda: double.iterate_kwargs([1]),
        lambda: BashOperator(task_id="b", bash_command="true").iterate(env=[{}]),
        lambda: BashOperator(task_id="b", bash_command="true").iterate_kwargs([{}]),
        lambda: Streams.partial(task_id="s").iterate(doc_md=["a"]),
        lambda: BranchPythonOperator.partial(task_id="s", python_callable=print).iterate(op_args=[["a"]]),
    ],
)
def test_what_cannot_run_in_one_attempt_is_refused(define: Callable[[], Any]) -> None:
    with pytest.raises(DagError), DAG("d") as dag:
        define()
        serialize_dag(dag)


def test_a_source_that_is_no_list_is_refused_with_the_name_of_the_call():
    with DAG("dag"), pytest.raises(DagError, match=r"argument 'x' of iterate\(\) is of type int"):
        task(task_id="f")(lambda x: x).iterate(x=5)
