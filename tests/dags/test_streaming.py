from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from tests.dags.attempts import Claim, Resume
from tests.dags.attempts import Services as StoreServices

from tidemill.core.tasks.endings import Deferral, Failure, Idle, Skip
from tidemill.dags import DAG, BaseOperator
from tidemill.dags.attempt.batch_services import BatchServices
from tidemill.dags.attempt.streaming import AttemptIdle, StreamAction, StreamPlan, StreamRun, StreamTaskEnd
from tidemill.dags.attempt.task_services import BatchWrites, HandledBatch, XComQuery
from tidemill.dags.exceptions import DagError, TaskDeferralError, TaskDeferred, TaskFailed, TaskTimeout
from tidemill.dags.execution.running import run_attempt
from tidemill.runtime.json.codec import decode, encode
from tidemill.store.calls.stream_calls import StreamBatch, StreamEvent
from tidemill.store.calls.trigger_calls import EventEnding
from tidemill.store.calls.worker_calls import ClaimedStream, EarlierStream
from tidemill.triggers import BaseEventTrigger, TimeDeltaTrigger


class Services:
    """A store with the events of one stream, which has ended once all were taken."""

    def __init__(
        self, *payloads: Any, error: str | None = None, open: bool = False, ending: EventEnding | None = None
    ) -> None:
        self.ending = ending
        self.events = [StreamEvent(number, encode(one), None, 1) for number, one in enumerate(payloads)]
        self.error, self.open = error, open
        self.kept: list[tuple[int, int, tuple[tuple[str, str | None], ...], str | None]] = []
        self.said: list[tuple[bool, bool]] = []
        self.waits: list[float] = []
        self.taken: list[int] = []
        self.of: list[tuple[int, int | None, bool]] = []
        self.writes: list[BatchWrites] = []
        self.store = StoreServices()
        #: The payloads of streams of earlier tries, and those of them that wait for a map with a full backlog.
        self.earlier: dict[int, list[Any]] = {}
        self.held: set[int] = set()

    def take_events(self, trigger: int, after: int, limit: int, wait_seconds: float) -> StreamBatch:
        self.waits.append(wait_seconds)
        if trigger in self.earlier:
            payloads = list(enumerate(self.earlier[trigger]))[after:]
            if trigger in self.held:
                return StreamBatch(trigger, left=len(payloads))
            taken = tuple(StreamEvent(number, encode(one), None, 1) for number, one in payloads[:limit])
            return StreamBatch(trigger, taken, left=len(payloads) - len(taken))
        events = tuple(self.events[after : after + limit])
        ended = not self.open and after + len(events) == len(self.events)
        self.taken.append(len(events))
        return StreamBatch(trigger, events, ended, self.error if ended else None, 0, self.ending if ended else None)

    def keep_batch(self, batch: HandledBatch) -> None:
        self.kept.append((batch.handled, batch.number, batch.emitted, batch.checkpoint))
        self.said.append((batch.stops, batch.lists))
        self.of.append((batch.trigger, batch.current, batch.final))
        self.writes.append(batch.writes)


class Operator:
    stream_max_events, stream_max_wait, stream_linger, allow_empty_stream = 2, 0.0, 2.0, False
    handles_streams, task_id = True, "read"

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, Any, bool]]] = []

    def handle_trigger_events(self, events: Sequence[Any], context: Any) -> Any:
        self.batches.append([(one.sequence_index, one.payload, one.is_last) for one in events])
        for one in events:
            context["stream"].emit(one.payload)
            context["stream"].checkpoint(one.sequence_index)
        return None

    def on_stream_end(self, context: Any) -> Any:
        return "end"


def run(
    operator: Any,
    services: Services,
    plan: StreamPlan | None = None,
    claim: ClaimedStream | None = None,
    *,
    step: float = 0.0,
    lists: bool = False,
) -> Any:
    """Run an attempt. `step`: the seconds between two looks at the clock."""
    context: dict[str, Any] = {}
    sleeps: list[float] = []
    services_: Any = services
    clock = itertools.count()
    stream = StreamRun(
        operator,
        plan or StreamPlan(""),
        claim or ClaimedStream(7),
        context,
        services_,
        lambda: next(clock) * step,
        sleeps.append,
        lists=lists,
    )
    return stream.run()


def test_events_come_in_batches_and_each_is_kept_with_what_it_derived():
    operator, services = Operator(), Services("a", "b", "c")
    assert run(operator, services) == "end"
    assert operator.batches == [[(0, "a", False), (1, "b", False)], [(2, "c", True)]]
    assert services.kept == [(2, 1, (('"a"', None), ('"b"', None)), "1"), (3, 2, (('"c"', None),), "2")]


def test_an_attempt_begins_after_what_was_handled():
    operator, services = Operator(), Services("a", "b", "c")
    run(operator, services, claim=ClaimedStream(7, 2, 5, '"x"'))
    assert operator.batches == [[(2, "c", True)]]
    assert [number for _, number, _, _ in services.kept] == [6]


def test_events_of_earlier_tries_come_first_with_the_numbers_of_their_own_triggers():
    operator, services = Operator(), Services("c")
    services.earlier = {3: ["x", "a", "b", "d"], 5: ["e"]}
    claim = ClaimedStream(7, carried=4, earlier=(EarlierStream(3, 1, 4), EarlierStream(5, 0, 0)))
    assert run(operator, services, claim=claim) == "end"
    assert [[payload for _, payload, _ in batch] for batch in operator.batches] == [["a", "b"], ["d"], ["e"], ["c"]]
    assert [(handled, number) for handled, number, _, _ in services.kept] == [(3, 5), (4, 6), (1, 1), (1, 1)]
    assert services.of == [(3, 7, False), (3, 7, False), (5, 7, False), (7, None, False)]
    assert [is_last for batch in operator.batches for _, _, is_last in batch] == [False, False, False, False, True]


def test_a_stop_while_events_of_an_earlier_try_are_handled_is_the_end():
    operator, services = Operator(), Services("c")
    services.earlier = {3: ["a", "b"]}
    operator.handle_trigger_events = lambda events, context: StreamAction.STOP  # type: ignore[method-assign]
    assert run(operator, services, claim=ClaimedStream(7, carried=2, earlier=(EarlierStream(3, 0, 0),))) == "end"
    assert (services.said, services.of) == ([(True, False)], [(3, 7, False)])


def test_events_of_an_earlier_try_that_wait_for_a_map_give_the_worker_back():
    services = Services("c")
    services.earlier, services.held = {3: ["a"]}, {3}
    with pytest.raises(AttemptIdle):
        run(Operator(), services, claim=ClaimedStream(7, carried=1, earlier=(EarlierStream(3, 0, 0),)))
    assert services.waits == [0.0, 2.0]


def test_a_stream_may_be_empty_if_another_try_has_left_something():
    services = Services()
    services.earlier = {3: ["a"]}
    operator = Operator()
    assert run(operator, services, claim=ClaimedStream(7, carried=1, earlier=(EarlierStream(3, 0, 0),))) == "end"
    assert run(operator, Services(), claim=ClaimedStream(7, carried=1)) == "end"
    assert run(operator, Services(), claim=ClaimedStream(7, checkpoint='"page 9"')) == "end"


def test_what_is_emitted_at_the_end_is_marked_as_final():
    operator, services = Operator(), Services("a")
    operator.on_stream_end = lambda context: context["stream"].emit("total")  # type: ignore[method-assign]
    assert run(operator, services) is None
    assert services.of == [(7, None, False), (7, None, True)]


def test_an_attempt_without_an_event_leaves_its_worker():
    with pytest.raises(AttemptIdle) as idle:
        run(Operator(), Services("a", open=True), StreamPlan("", idle_us=500_000))
    assert idle.value.ending == Idle(500_000)


@pytest.mark.parametrize(("step", "left"), [(0.2, 300_000), (0.6, 0)])
def test_the_time_that_an_attempt_has_waited_counts_in_the_idle_timeout(step, left):
    with pytest.raises(AttemptIdle) as idle:
        run(Operator(), Services(open=True), StreamPlan("", idle_us=500_000), step=step)
    assert idle.value.ending == Idle(left)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stream_max_events", value) for value in (0, -1, 1.5, "5", True)),
        *(("stream_linger", value) for value in (-1, float("nan"), float("inf"), "2", timedelta(1))),
        ("stream_max_wait", -1),
    ],
)
def test_limits_that_make_no_sense_are_refused(name, value):
    operator = Operator()
    setattr(operator, name, value)
    with pytest.raises(DagError, match=name):
        run(operator, Services("a"))


def test_a_batch_may_have_any_number_of_events():
    operator = Operator()
    operator.stream_max_events = 10**30
    assert run(operator, Services("a")) == "end"


@pytest.mark.parametrize(("seconds", "leaves"), [(1, False), (60, True)])
def test_a_pause_longer_than_the_linger_gives_the_worker_back(seconds, leaves):
    operator = Operator()
    operator.handle_trigger_events = lambda events, context: StreamAction.pause(seconds)  # type: ignore[method-assign]
    services = Services("a", open=True)
    with pytest.raises(AttemptIdle) as idle:
        run(operator, services)
    assert idle.value.ending == (Idle(None, 60_000_000) if leaves else Idle())
    assert [handled for handled, *_ in services.kept] == [1]


def test_stop_ends_the_stream_and_an_unknown_result_is_refused():
    operator, services = Operator(), Services("a", "b", "c")
    operator.handle_trigger_events = lambda events, context: StreamAction.STOP  # type: ignore[method-assign]
    assert run(operator, services) == "end"
    assert [handled for handled, *_ in services.kept] == [2]
    assert services.said == [(True, False)]


async def _handle(*arguments: Any, **event: Any) -> None:
    raise AssertionError("it is never awaited")


def _yield(*arguments: Any) -> Any:
    yield from arguments


@pytest.mark.parametrize("handle", [lambda events, context: 7, _handle, _yield])
def test_a_batch_whose_handler_has_the_wrong_form_is_not_kept(handle):
    operator, services = Operator(), Services("a")
    operator.handle_trigger_events = handle
    with pytest.raises(TaskFailed):
        run(operator, services)
    assert services.kept == []
    operator.handles_streams, operator.use = False, _handle  # type: ignore[attr-defined]
    with pytest.raises(TaskFailed):
        run(operator, services, StreamPlan("use"))
    assert services.kept == []


def test_the_error_of_the_trigger_comes_after_its_events():
    operator = Operator()
    with pytest.raises(TaskDeferralError, match="ValueError: no"):
        run(operator, Services("a", error="Traceback\nValueError: no"))
    assert [event for batch in operator.batches for event in batch] == [(0, "a", False)]


def test_a_stream_without_an_event_is_an_error_unless_it_is_allowed():
    operator = Operator()
    with pytest.raises(TaskDeferralError, match="allow_empty_stream"):
        run(operator, Services())
    operator.allow_empty_stream = True
    assert run(operator, Services()) == "end"


def test_a_method_is_called_per_event_and_what_it_returns_is_an_element():
    calls: list[Any] = []
    operator = Operator()
    operator.handles_streams = False
    operator.use = lambda context, event, more: calls.append((event, more)) or event  # type: ignore[attr-defined]
    services = Services("a", None, "c")
    run(operator, services, StreamPlan("use", {"more": 1}))
    assert calls == [("a", 1), (None, 1), ("c", 1)]
    assert [emitted for _, _, emitted, _ in services.kept] == [(('"a"', None),), (), (('"c"', None),)]
    assert [handled for handled, *_ in services.kept] == [1, 2, 3]
    assert services.taken == [2, 1]


def test_a_method_that_fails_keeps_the_events_of_its_batch_before_that():
    operator, services = Operator(), Services("a", "b", "c")
    operator.handles_streams = False
    seen: list[int | None] = []

    def use(context: Any, event: Any) -> Any:
        seen.append(context["stream"].index)
        if event == "b":
            raise ValueError("no")

    operator.use = use  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no"):
        run(operator, services, StreamPlan("use"))
    assert [handled for handled, *_ in services.kept] == [1]
    assert seen == [0, 1]


def test_a_method_stops_in_the_middle_of_its_batch():
    operator, services = Operator(), Services("a", "b", "c")
    operator.handles_streams = False
    operator.use = lambda context, event: StreamAction.STOP  # type: ignore[attr-defined]
    assert run(operator, services, StreamPlan("use")) == "end"
    assert [handled for handled, *_ in services.kept] == [1]


@pytest.mark.parametrize("payloads", [(), ("a", "b", "c")])
def test_an_event_that_ends_the_task_comes_after_the_others_and_instead_of_the_end(payloads):
    operator = Operator()
    operator.on_stream_end = lambda context: pytest.fail("it must not run")  # type: ignore[method-assign]
    ending = EventEnding("success", "", (("return_value", "7"),))
    with pytest.raises(StreamTaskEnd) as ended:
        run(operator, Services(*payloads, ending=ending))
    assert ended.value.ending == ending
    handled = [event for batch in operator.batches for event in batch]
    assert handled == [(number, one, False) for number, one in enumerate(payloads)]


def test_an_operator_with_a_handler_gets_batches_whatever_method_its_deferral_names():
    operator = Operator()
    run(operator, Services("a"), StreamPlan("use", {"more": 1}))
    assert operator.batches == [[(0, "a", True)]]


def test_what_only_the_result_can_show_becomes_a_list_unless_the_end_returns_another():
    operator = Operator()
    services = Services("a")
    run(operator, services, lists=True)
    assert services.said == [(False, False)]
    operator.on_stream_end = lambda context: None  # type: ignore[method-assign]
    services = Services("a")
    run(operator, services, lists=True)
    assert services.said == [(False, False), (False, True)]


def test_an_exception_of_the_handler_keeps_nothing_of_its_batch():
    operator, services = Operator(), Services("a", "b", "c")
    handled = operator.handle_trigger_events

    def fail(events: Any, context: Any) -> Any:
        handled(events, context)
        if events[0].sequence_index:
            raise ValueError("no")

    operator.handle_trigger_events = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        run(operator, services)
    assert [handled for handled, *_ in services.kept] == [2]


def test_elements_are_checked_when_they_are_emitted():
    operator = Operator()
    operator.handle_trigger_events = lambda events, context: context["stream"].emit("x" * (1 << 20))  # type: ignore[method-assign]
    with pytest.raises(TaskFailed, match="at most"):
        run(operator, Services("a"))
    operator.handle_trigger_events = lambda events, context: context["stream"].emit("x", 7)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="identity"):
        run(operator, Services("a"))


def test_what_a_handler_writes_is_stored_with_its_batch():
    services, operator = Services("a", "b", "c", "d"), Operator()
    services.store.state = {"old": "1", "count": "2"}
    services.store.xcoms = {("read", "kept"): "0"}
    held = BatchServices(services_with(services), "read", -1)
    seen: list[Any] = []

    def handle(events: Sequence[Any], context: Any) -> None:
        count = int(held.get_task_state("count") or 0) + len(events)
        held.set_task_state("count", str(count))
        held.push_xcom("last", encode(events[-1].payload))
        seen.append(
            (
                held.get_task_state("count"),
                held.get_xcom(XComQuery(("read", "other"), "last")),
                held.get_task_state("old"),
            )
        )
        held.delete_task_state("old") if len(seen) > 1 else held.clear_task_state()
        seen.append((held.get_task_state("count"), held.get_task_state("old")))

    def end(context: Any) -> None:
        held.push_xcom("end", "1")

    operator.handle_trigger_events, operator.on_stream_end = handle, end  # type: ignore[method-assign]
    run(operator, held)  # type: ignore[arg-type]
    assert seen[0] == ("4", ('"b"', None), "1")
    assert seen[1] == (None, None)
    assert services.writes == [
        BatchWrites((("last", '"b"'),), (), clears_state=True),
        BatchWrites((("last", '"d"'),), (("count", "4"), ("old", None))),
        BatchWrites((("end", "1"),)),
    ]
    # After the end of the stream writes go to the store at once.
    held.push_xcom("later", "2")
    held.set_task_state("later", "3")
    held.delete_task_state("old")
    assert services.store.xcoms["", "later"] == "2"
    assert services.store.state == {"count": "2", "later": "3"}
    held.clear_task_state()
    assert services.store.state == {}


def services_with(services: Services) -> Any:
    """Return the services of a stream with those of a store in memory."""
    return SimpleNamespace(
        **{name: getattr(services.store, name) for name in dir(services.store) if not name.startswith("_")},
        take_events=services.take_events,
        keep_batch=services.keep_batch,
    )


def test_what_a_handler_that_fails_has_written_is_not_stored():
    services, operator = Services("a"), Operator()
    held = BatchServices(services_with(services), "read", -1)

    def handle(events: Sequence[Any], context: Any) -> None:
        held.push_xcom("last", "1")
        raise ValueError

    operator.handle_trigger_events = handle  # type: ignore[method-assign]
    with pytest.raises(ValueError):
        run(operator, held)  # type: ignore[arg-type]
    assert (services.store.xcoms, services.writes) == ({}, [])


@pytest.mark.parametrize("state", ["skipped", "failed"])
def test_the_xcoms_of_an_event_that_ends_the_task_are_stored(state):
    class Read(BaseOperator):
        def handle_trigger_events(self, events: Any, context: Any) -> None: ...

    with DAG("dag") as dag:
        Read(task_id="read")
    services = Services("a", ending=EventEnding(state, "no", (("key", "7"),)))
    claim = Claim("dag", "read", resume=Resume("", StreamPlan("").write(), ""), stream=ClaimedStream(7))
    ending = run_attempt(dag, claim, services_with(services)).ending
    assert isinstance(ending, Skip if state == "skipped" else Failure)
    assert services.store.xcoms["", "key"] == "7"


def test_what_is_written_before_a_deferral_at_the_end_is_stored():
    services, operator = Services("a"), Operator()
    held = BatchServices(services_with(services), "read", -1)

    def end(context: Any) -> None:
        held.push_xcom("end", "1")
        context["stream"].emit("total")
        raise TaskDeferred(trigger=None, method_name="later")

    operator.on_stream_end = end  # type: ignore[method-assign]
    with pytest.raises(TaskDeferred):
        run(operator, held)  # type: ignore[arg-type]
    assert services.kept[-1][2] == (('"total"', None),)
    assert services.of[-1] == (7, None, True)
    assert services.writes[-1] == BatchWrites((("end", "1"),))


def test_a_handler_that_defers_in_the_middle_of_its_stream_fails():
    services, operator = Services("a", "b"), Operator()

    def handle(events: Sequence[Any], context: Any) -> None:
        raise TaskDeferred(trigger=None, method_name="later")

    operator.handle_trigger_events = handle  # type: ignore[method-assign]
    with pytest.raises(TaskFailed, match="defer in on_stream_end"):
        run(operator, services)
    assert services.kept == []


def test_the_writes_of_a_batch_fit_into_one_message():
    held = BatchServices(services_with(Services()), "read", -1)
    for number in range(16):
        held.push_xcom(str(number), "x" * (1 << 20))
    with pytest.raises(TaskFailed, match="stream_max_events"):
        held.set_task_state("one", "x")


def test_a_plan_is_stored_with_its_deferral():
    plan = StreamPlan("use", {"more": 1}, 5)
    assert decode(plan.write()) == {"method": "use", "kwargs": {"more": 1}, "idle_us": 5}
    assert SimpleNamespace(**decode(plan.write())).idle_us == 5


def test_the_elements_of_a_batch_fit_into_one_message():
    operator = Operator()

    def emit(events: Any, context: Any) -> None:
        for _ in range(40):
            context["stream"].emit("x" * 1_000_000)

    operator.handle_trigger_events = emit  # type: ignore[method-assign]
    with pytest.raises(TaskFailed, match="stream_max_events"):
        run(operator, Services("a"))


@pytest.mark.parametrize(
    ("due_us", "soft", "ending"),
    [
        (5, False, "TaskDeferralTimeout: the stream did not end before the timeout of the deferral"),
        (6, False, "TaskTimeout: it takes too long"),
        (5, True, "skipped"),
    ],
)
def test_an_attempt_whose_stream_is_too_late_ends_as_the_deferral_would(due_us, soft, ending):
    class Read(BaseOperator):
        soft_fail = soft

        def handle_trigger_events(self, events: Any, context: Any) -> None:
            raise TaskTimeout("it takes too long")

    with DAG("dag") as dag:
        Read(task_id="read")
    resume = Resume("", StreamPlan("").write(), "null")
    claim = Claim("dag", "read", resume=resume, deadline_us=5, stream=ClaimedStream(7, due_us=due_us))
    services: Any = Services("a")
    result = run_attempt(dag, claim, services).ending
    assert (result.error if isinstance(result, Failure) else "skipped") == ending
    assert isinstance(result, Skip) is soft


@pytest.mark.parametrize(("checkpoint", "cursor"), [(None, None), ('{"page":3}', {"page": 3})])
def test_a_try_may_begin_at_the_checkpoint_of_an_earlier_one(checkpoint, cursor):
    class Read(BaseOperator):
        def execute(self, context: Any) -> Any:
            return {"from": context["stream"].cursor}

        def handle_trigger_events(self, events: Any, context: Any) -> None: ...

    with DAG("dag") as dag:
        Read(task_id="read")
    services: Any = Services()
    result = run_attempt(dag, Claim("dag", "read", checkpoint=checkpoint), services)
    assert [decode(value) for _, value in result.xcoms] == [{"from": cursor}]


def test_a_list_that_an_operator_returns_without_a_stream_has_the_elements_of_its_maps():
    class Read(BaseOperator):
        def execute(self, context: Any) -> Any:
            return [1, 2]

        def handle_trigger_events(self, events: Any, context: Any) -> None: ...

    with DAG("dag") as dag:
        Read(task_id="read")
    services: Any = StoreServices()
    result = run_attempt(dag, Claim("dag", "read"), services)
    assert [value for _, values in services.emitted for value in values] == ["1", "2"]  # in one group or two
    assert result.xcoms == (("return_value", "[1,2]"),)


class Polled(BaseEventTrigger):
    """Reads a shared stream that is not acknowledged."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"tests.dags.test_streaming.{type(self).__name__}", {}

    def shared_stream_key(self) -> str:
        return "key"

    async def run(self) -> Any:
        raise AssertionError("an attempt runs no trigger")
        yield


class Acknowledged(Polled):
    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> Any:
        raise AssertionError("an attempt needs no producer")


class Alone(Acknowledged):
    def shared_stream_key(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("cls", "streaming", "acked"),
    [
        (Polled, True, False),
        (Acknowledged, True, True),
        (Acknowledged, False, False),
        (Alone, True, False),
    ],
)
def test_a_deferral_says_whether_its_events_can_come_again(cls: type[BaseEventTrigger], streaming: bool, acked: bool):
    class Read(BaseOperator):
        def execute(self, context: Any) -> None:
            self.defer(trigger=cls(), method_name="use", streaming=streaming)

        def use(self, context: Any, event: Any) -> None: ...

    with DAG("d") as dag:
        Read(task_id="read")
    ending = run_attempt(dag, Claim("d", "read"), StoreServices()).ending
    assert isinstance(ending, Deferral)
    assert (ending.streams, ending.acked) == (streaming, acked)


@pytest.mark.parametrize("streaming", [None, True])
def test_a_deferral_without_a_method_needs_a_handler(streaming):
    class Read(BaseOperator):
        def execute(self, context: Any) -> Any:
            self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=1)), streaming=streaming)

    with DAG("dag") as dag:
        Read(task_id="read")
    services: Any = StoreServices()
    ending = run_attempt(dag, Claim("dag", "read"), services).ending
    assert isinstance(ending, Failure)
    assert "method_name" in ending.error
