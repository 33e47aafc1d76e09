"""A task, its streams and their triggers in any order: no event is lost, none comes twice, and none after a stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.examples import examples

from tidemill.core.tasks.attempt import Fenced, Moved, feed
from tidemill.core.tasks.dependencies import Readiness, TaskOutcome
from tidemill.core.tasks.inputs import (
    Admit,
    Cancel,
    Claim,
    CleanedUp,
    Clear,
    Deferred,
    DiscardEvents,
    Due,
    Ended,
    Failed,
    Input,
    Lost,
    MakeTrigger,
    Mark,
    Ready,
    Returned,
    StopTrigger,
    StreamIdle,
    StreamReady,
    Succeeded,
)
from tidemill.core.tasks.stream_progress import StreamProgress
from tidemill.core.tasks.task_row import ENDED, Policy, TaskRow, TaskState

_WORKER, _TRIGGERER = 7, 9


def test_an_event_that_ends_the_task_is_not_delivered():
    progress = StreamProgress(next_index=3, handled=2, ended=True, ends_at=2)
    assert (progress.last, progress.undelivered, progress.has_events, progress.ready) == (2, 0, False, True)
    assert StreamProgress(carried=1).ready
    assert not StreamProgress(5, 5).ready


@dataclass
class Stream:
    """The events of one trigger, as the store has them."""

    events: list[int] = field(default_factory=list)
    handled: int = 0
    ended: bool = False
    #: Whether its trigger runs.
    lives: bool = True


@dataclass
class World:
    """A store with one task, which reads an acknowledged stream in each try."""

    task: TaskRow
    now: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    fired: int = 0
    handled: list[int] = field(default_factory=list)
    discarded: set[int] = field(default_factory=set)
    stopped: bool = False

    @property
    def current(self) -> Stream | None:
        return None if self.task.stream is None else self.streams[self.task.stream.epoch]

    @property
    def progress(self) -> StreamProgress:
        current = self.current
        assert current is not None
        carried = sum(len(one.events) - one.handled for one in self.streams.values() if one is not current)
        return StreamProgress(len(current.events), current.handled, current.ended, carried=carried)

    def give(self, given: Input) -> bool:
        """Feed an input as the store does; return whether it changed something."""
        answer = feed(self.task, given, self.now)
        assert not isinstance(answer, Fenced)
        if not isinstance(answer, Moved):
            return False
        before, self.task = self.task, answer.task
        for effect in answer.effects:
            match effect:
                case StopTrigger():
                    self.streams[before.trigger].lives = False  # type: ignore[index]
                case MakeTrigger(epoch=epoch):
                    self.streams[epoch] = Stream()
                case DiscardEvents():
                    self.discard()
        return True

    def discard(self) -> None:
        for one in self.streams.values():
            self.discarded.update(one.events[one.handled :])
            one.handled = len(one.events)

    def resume(self) -> None:
        """Look at the stream of a task that waits, as the scheduler does after an event or a deferral."""
        if self.task.state is TaskState.DEFERRED and self.progress.ready:
            self.give(StreamReady(self.task.epoch))

    def fire(self) -> None:
        current = self.current
        # The store refuses the events of a trigger that was stopped.
        if current is not None and current.lives and not current.ended:
            assert not self.stopped
            current.events.append(self.fired)
            self.fired += 1
            self.resume()

    def end(self) -> None:
        current = self.current
        if current is not None and current.lives:
            current.ended = True
            self.resume()

    def handle(self, number: int) -> None:
        """Handle and keep events, those of earlier tries first."""
        if self.task.state is not TaskState.RUNNING or self.current is None:
            return
        for one in [*(one for one in self.streams.values() if one is not self.current), self.current]:
            if batch := one.events[one.handled : one.handled + number]:
                assert not self.stopped
                one.handled += len(batch)
                self.handled += batch
                return

    def stop(self) -> None:
        """Have the handler return STOP, which the store keeps with its batch."""
        current = self.current
        if self.task.state is TaskState.RUNNING and current is not None and self.progress.has_events:
            self.handle(1)
            self.discard()
            current.lives, current.ended, self.stopped = False, True, True

    def attempt(self) -> None:
        """Bring the task one step nearer to an attempt that handles its stream."""
        epoch = self.task.epoch
        match self.task.state:
            case TaskState.NONE:
                self.stopped = False  # another life of the task
                self.give(Ready(epoch, Readiness.RUN))
            case TaskState.SCHEDULED:
                self.give(Admit(epoch))
            case TaskState.QUEUED:
                self.give(Claim(epoch, _WORKER))
            case TaskState.RUNNING if self.task.stream is None:
                self.stopped = False  # another try
                self.give(Deferred(epoch, "a trigger", "", streams=True))
                self.resume()
            case TaskState.UP_FOR_RETRY:
                self.now = self.task.next_due_us or self.now
                self.give(Due(epoch))
            case TaskState.ENDING:
                self.give(Ended(epoch))
            case _:
                pass

    def leave(self) -> None:
        """End the attempt as it does without another event; whether there is one is looked up in this step."""
        if self.task.state is TaskState.RUNNING and self.current is not None:
            progress = self.progress
            if progress.ended and not progress.has_events:
                self.give(Succeeded(self.task.epoch))
            else:
                self.give(StreamIdle(self.task.epoch, ready=progress.ready))


STEPS = ["fire", "fire", "fire", "attempt", "attempt", "handle", "handle", "leave", "lose", "return", "fail"]
RARE = ["end", "stop", "clear", "mark", "cancel", "cleaned_up"]


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from([*STEPS, *STEPS, *RARE]), max_size=60), st.data())
def test_in_any_order_no_event_is_lost_none_comes_twice_and_none_after_a_stop(steps, data):
    world = World(TaskRow(Policy(retries=1, retry_delay_us=0), max_tries=2))
    for step in steps:
        epoch = world.task.epoch
        match step:
            case "handle":
                world.handle(data.draw(st.integers(1, 3)))
            case "lose":
                world.give(Lost(epoch))
            case "return":
                world.give(Returned(epoch))
            case "fail":
                world.give(Failed(epoch, "it broke"))
            case "clear":
                world.give(Clear(triggerer=_TRIGGERER))
            case "mark":
                world.give(Mark(TaskOutcome.SUCCESS, triggerer=_TRIGGERER))
            case "cancel":
                world.give(Cancel(triggerer=_TRIGGERER))
            case "cleaned_up":
                world.give(CleanedUp(epoch))
            case _:
                getattr(world, step)()
        assert len(set(world.handled)) == len(world.handled), "none twice"
        assert world.handled == sorted(world.handled), "in order"
        assert not world.discarded & set(world.handled)
        waits = world.task.state is TaskState.DEFERRED
        assert not (waits and world.progress.ready), "no event waits for a task that waits for it"
    # Whatever has happened, the task goes on until nothing is left.
    for _ in range(200):
        if world.task.state is TaskState.DEFERRED:
            world.end()
        elif world.task.state in ENDED and world.task.state is not TaskState.SUCCESS:
            world.give(Clear())
        elif world.task.state is TaskState.SUCCESS:
            break
        elif world.current is not None and world.task.state is TaskState.RUNNING and world.progress.has_events:
            world.handle(9)
        elif world.current is not None and world.task.state is TaskState.RUNNING:
            world.leave()
        else:
            world.attempt()
    assert world.task.state is TaskState.SUCCESS
    assert {*world.handled, *world.discarded} == set(range(world.fired)), "none lost"
