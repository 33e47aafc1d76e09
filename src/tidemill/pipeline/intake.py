"""The entry of an engine: takes messages from the source as backpressure allows, and closes windows.

The intake holds the owned partitions. Its pump visits only partitions with news (new messages, or room for waiting
ones), so that an idle partition costs nothing. A message that cannot be parsed is dead-lettered here; every other
message ends up in exactly one window, in order. After `stop`, no message is taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.core.errors import describe_error
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.core.pipeline.window import Window, Windowing
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.key_order import Opened
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.reports.snapshots import PartitionStatistics
from tidemill.pipeline.windows.waiting_window import WaitingWindow
from tidemill.runtime.kafka.record_headers import check_headers
from tidemill.runtime.kafka.source_message import SourceMessage, list_sizes, set_field
from tidemill.runtime.log.user_code import explain_error
from tidemill.sources.base import Source, TopicPartition


class _PartitionIntake:
    """The intake's state of one partition.

    Attributes:
        owned: The partition.
        arrange_again: Queues a window of the partition for `arrange`.
        windowing: Collects messages into windows.
        waiting: Windows that wait for `arrange`, which is serial per partition.
        arranging: Whether a job is working through `waiting`.
        arranged: The window whose `arrange` hook is running.
        linger: The timer that closes the open window.
    """

    __slots__ = ("arrange_again", "arranged", "arranging", "linger", "owned", "waiting", "windowing")

    def __init__(
        self,
        owned: OwnedPartition,
        windowing: Windowing[Opened],
        arrange_soon: Callable[[_PartitionIntake, WaitingWindow], None],
    ) -> None:
        self.owned = owned
        self.windowing = windowing
        self.arrange_again = partial(arrange_soon, self)
        self.waiting: deque[WaitingWindow] = deque()
        self.arranging = False
        self.arranged: WaitingWindow | None = None
        self.linger: asyncio.TimerHandle | None = None

    def drop_waiting(self) -> list[int]:
        """Drop the windows that are not arranged yet; return the first offset of each."""
        unarranged = [window.messages[0].offset for window in self.waiting]
        self.waiting.clear()
        if self.arranged is not None:
            unarranged.append(self.arranged.messages[0].offset)
        if (window := self.windowing.flush()) is not None:
            unarranged.append(window.items[0][0].offset)
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None
        return unarranged


class Intake:
    """The partitions of an engine, and the pump that fills them.

    Args:
        limits: The limits of windows, and the order of tasks.
        source: The source of an engine's messages.
        idle: Set whenever the engine may have become idle; see `wait_until_idle`.

    Attributes:
        partitions: The owned partitions.
    """

    def __init__(self, limits: ExecutorSettings, source: Source, idle: asyncio.Event) -> None:
        self._limits = limits
        self._source = source
        self._idle = idle
        self.partitions: dict[TopicPartition, OwnedPartition] = {}
        self._intakes: dict[TopicPartition, _PartitionIntake] = {}
        self._names: list[str] | None = []
        # Partitions that the pump has to visit, in turn; and those it found without room, until they get some.
        self._news: dict[TopicPartition, _PartitionIntake] = {}
        self._starved: dict[TopicPartition, _PartitionIntake] = {}
        self._shares_grew = False
        self._pumping = False
        self._open = False
        self._paused = False
        self._held: frozenset[int] = frozenset()
        self._braked = False
        self._wants_one = False

    # -- owned partitions -------------------------------------------------------------------------------------

    def attach(self, context: EngineContext) -> None:
        """Connect the intake to the engine's other parts, which are built after it."""
        self._context = context
        self._counts_results = context.mode.waits_for_sinks

    def start(self) -> None:
        """Start to take messages of partitions that are assigned from now on."""
        self._loop = asyncio.get_running_loop()
        self._open = True

    def stop(self) -> None:
        """Take no more messages; those already taken become windows."""
        self._open = False
        for intake in self._intakes.values():
            self._close_window(intake, intake.windowing.flush())

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Pause exactly these partitions of the source topic until `resume`; None: pause all."""
        self._paused = partitions is None
        self._held = frozenset(partitions or ())
        self._pump_soon()

    def resume(self) -> None:
        """Take messages of all partitions again."""
        self.pause(())

    def brake(self, on: bool) -> None:
        """Take only what `take_one` requests while `on`; otherwise take messages again."""
        self._braked, self._wants_one = on, False
        self._pump_soon()

    def take_one(self) -> None:
        """Take one message despite the brake, as soon as there is one."""
        self._wants_one = True
        self._pump_soon()

    def assign(self, partition: TopicPartition) -> None:
        """Take ownership of a partition; work of an earlier ownership is dropped."""
        if partition in self.partitions:
            self.forget(self.partitions[partition])
        limits = self._limits
        owned = self.partitions[partition] = OwnedPartition(partition, self._context)
        windowing: Windowing[Opened] = Windowing(
            limits.window_size, limits.window_max_bytes, limits.window_linger_ms / 1000
        )
        self._intakes[partition] = _PartitionIntake(owned, windowing, self._arrange_soon)
        self._names = None
        self._context.load.assign(partition)
        self._visit(self._intakes[partition])

    def hand_over(self, owned: OwnedPartition) -> None:
        """Drop the unstarted work of a partition, and start no more of it."""
        owned.hand_over(self._intakes[owned.partition].drop_waiting())

    def close(self) -> None:
        """Ignore all further events of the partitions without giving them up."""
        self.stop()
        for intake in self._intakes.values():
            intake.drop_waiting()
            intake.owned.close()

    def forget(self, owned: OwnedPartition) -> None:
        """Give a partition up, unless that was done already; see `OwnedPartition.abandon`."""
        partition = owned.partition
        if self.partitions.get(partition) is not owned:
            return
        owned.abandon()
        self._intakes.pop(partition).drop_waiting()
        del self.partitions[partition]
        self._names = None
        for waiting in (self._news, self._starved):
            waiting.pop(partition, None)
        self._context.load.revoke(partition)
        self._shares_grew = True
        self._pump_soon()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until all work that was taken is done; the caller limits the time."""
        while any(owned.busy for owned in self.partitions.values()):
            self._idle.clear()
            await self._idle.wait()

    # -- reports ----------------------------------------------------------------------------------------------

    def statistics(self) -> PartitionStatistics:
        """Return the owned partitions, those that backpressure holds back, and the number of tasks held back."""
        if self._names is None:
            self._names = [owned.name for owned in self.partitions.values()]
        return PartitionStatistics(
            self._names, self._find_paused(), self._count_tasks_held_back(), self._context.load.count_bytes()
        )

    def _find_paused(self) -> list[str]:
        for intake in [intake for intake in self._starved.values() if self._room(intake.owned)]:
            del self._starved[intake.owned.partition]
        return [intake.owned.name for intake in self._starved.values()]

    def _count_tasks_held_back(self) -> int:
        count = self._context.counters.parked
        if self._limits.order_by == "key":
            count += sum(owned.order.waiting for owned in self.partitions.values() if owned.order is not None)
        return count

    def is_paused(self, partition: TopicPartition) -> bool:
        """Whether `pause` holds back this partition."""
        return self._paused or partition[1] in self._held

    def find_unarranged(self, partition: TopicPartition, offset: int) -> MessageStage | None:
        """Return the stage of a message that has no tasks yet; None: it was arranged."""
        intake, hook = self._intakes[partition], self._context.overridden.window_hook
        if intake.arranged is not None and _holds(intake.arranged.messages, offset):
            return MessageStage(stage=OpenStage.ARRANGE, hook=hook)
        if any(_holds(window.messages, offset) for window in intake.waiting):
            return MessageStage(stage=OpenStage.ARRANGE, hook=hook, why="it is busy with earlier messages")
        if any(message.offset == offset for message, _ in intake.windowing.items):
            return MessageStage(stage=OpenStage.WINDOW, why="its window to fill")
        return None

    # -- the pump ---------------------------------------------------------------------------------------------

    def arrived(self, partitions: Collection[TopicPartition]) -> None:
        """Take messages of these partitions in the next turn of the loop."""
        for partition in partitions:
            intake = self._intakes.get(partition)
            if intake is not None:
                self._visit(intake)

    def refill(self, partition: TopicPartition) -> None:
        """Take the waiting messages of a partition that may have more room than before."""
        if partition not in self._news and self._source.buffered(partition):
            intake = self._intakes.get(partition)
            if intake is not None:
                self._visit(intake)

    def committed(self, partition: TopicPartition, count: int) -> None:
        """Count messages that a commit passed."""
        self._context.load.note_committed(partition, count)
        self.refill(partition)

    def _visit(self, intake: _PartitionIntake) -> None:
        self._news[intake.owned.partition] = intake
        self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pumping and self._open:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Take what backpressure allows from every partition with news, round-robin, up to one window per round."""
        self._pumping = False
        if self._paused or not self._open:
            return
        if self._shares_grew:  # a partition was given up: starved ones may have room now
            self._shares_grew = False
            self._news |= self._starved
        if self._braked:
            self._try_one()
            return
        pull, window_size = self._source.pull, self._limits.window_size
        hungry = [intake for intake in self._news.values() if intake.owned.handover is None]
        self._news.clear()
        if self._held:
            # Paused partitions are visited again after `resume`.
            self._news |= {each.owned.partition: each for each in hungry if self.is_paused(each.owned.partition)}
            hungry = [intake for intake in hungry if intake.owned.partition not in self._news]
        while hungry:  # one window each per round, so that a busy partition does not delay the others
            still = []
            for intake in hungry:
                room = self._room(intake.owned)
                self._note_room(intake, room)
                messages = pull(intake.owned.partition, min(room, window_size)) if room > 0 else []
                if messages:
                    self._accept(intake, messages)
                    still.append(intake)
                else:
                    self._close_window(intake, intake.windowing.close_idle(self._loop.time()))
            hungry = still

    def _room(self, owned: OwnedPartition) -> int:
        undelivered = owned.undelivered if self._counts_results else 0
        return self._context.load.find_room(owned.partition, owned.undelivered_bytes, undelivered)

    def _note_room(self, intake: _PartitionIntake, room: int) -> None:
        owned = intake.owned
        owned.starved = room <= 0
        if owned.starved:
            self._starved[owned.partition] = intake
        else:
            self._starved.pop(owned.partition, None)

    def _try_one(self) -> None:
        """Take the message for the brake's trial, if the brake wants one and there is one."""
        for intake in self._intakes.values() if self._wants_one else ():
            owned = intake.owned
            if owned.handover is not None or self.is_paused(owned.partition) or self._room(owned) <= 0:
                continue
            messages = self._source.pull(owned.partition, 1)
            if messages and self._context.brake is not None:
                self._wants_one = False
                self._context.brake.taken(owned, messages[0].offset)
                self._accept(intake, messages)
                self._close_window(intake, intake.windowing.flush())
                return

    def _accept(self, intake: _PartitionIntake, messages: Sequence[SourceMessage]) -> None:
        owned, deserialize = intake.owned, self._context.handler.deserialize_message
        sizes = list_sizes(messages)
        owned.take(messages, sum(sizes))
        opened = list(
            zip(messages, self._context.commits.open_all(owned.partition, [m.offset for m in messages]), strict=True)
        )
        done = 0
        for index, message in enumerate(messages):
            error: BaseException | None = None
            if message.value is not None or message.headers_error is not None:
                try:
                    if message.headers_error is not None:
                        check_headers(message)
                    set_field(message, "payload", deserialize(message))
                    continue
                except BaseException as raised:  # any exception of the hook concerns this message alone
                    error = raised
            elif self._context.handler.accept_tombstones:
                continue
            if self._context.settings.kafka.on_parse_error == "pass" and error is not None:
                set_field(message, "parse_error", describe_error(error))
                continue
            self._add(intake, opened[done:index], sizes[done:index])
            done = index + 1
            self._refuse(intake, opened[index], error)
        self._add(intake, opened[done:], sizes[done:])
        self._set_linger(intake)

    def _add(self, intake: _PartitionIntake, opened: Sequence[Opened], sizes: Sequence[int]) -> None:
        for window in intake.windowing.add_all(opened, sizes, self._loop.time()):
            self._close_window(intake, window)

    def _refuse(self, intake: _PartitionIntake, opened: Opened, error: BaseException | None) -> None:
        """Dead-letter a message that cannot be parsed, or a tombstone; it takes no further part."""
        context, (message, entry) = self._context, opened
        if error is None:
            intake.owned.reject(message, entry, LetterKind.TOMBSTONE, "the handler does not accept tombstones")
        elif context.brake is None:
            intake.owned.reject(message, entry, LetterKind.PARSE, explain_error(error, "deserialize_message"))
        else:  # a window of its own preserves its order, whether it is dead-lettered or held
            self._close_window(intake, intake.windowing.flush())
            now, again = self._loop.time(), intake.arrange_again
            again(WaitingWindow(context, intake.owned, [message], [entry], now, again, is_parsed=False))

    # -- windows ----------------------------------------------------------------------------------------------

    def _set_linger(self, intake: _PartitionIntake) -> None:
        due = intake.windowing.due
        if due is not None and intake.linger is None:
            intake.linger = self._loop.call_at(due, self._linger_over, intake)

    def _linger_over(self, intake: _PartitionIntake) -> None:
        intake.linger = None
        if not intake.owned.closed:
            self._close_window(intake, intake.windowing.expire(self._loop.time()))
            self._set_linger(intake)

    def _close_window(self, intake: _PartitionIntake, window: Window[Opened] | None) -> None:
        if window is not None:
            messages = [message for message, _ in window.items]
            entries = [entry for _, entry in window.items]
            now, again = self._loop.time(), intake.arrange_again
            self._arrange_soon(intake, WaitingWindow(self._context, intake.owned, messages, entries, now, again))

    def _arrange_soon(self, intake: _PartitionIntake, window: WaitingWindow) -> None:
        """Queue a window behind the windows of its partition that already wait for `arrange`."""
        intake.waiting.append(window)
        if not intake.arranging:
            intake.arranging = True
            self._context.hooks.submit(self._arrange, intake)

    async def _arrange(self, intake: _PartitionIntake) -> None:
        try:
            while intake.waiting:
                intake.arranged = intake.waiting.popleft()
                parts = await intake.arranged.arrange()
                if parts:
                    intake.waiting.extendleft(reversed(parts))
                intake.arranged = None
                if self._context.hooks.is_turn_due:
                    await self._context.hooks.give_turn()
        finally:
            intake.arranging = False


def _holds(messages: Sequence[SourceMessage], offset: int) -> bool:
    return messages[0].offset <= offset <= messages[-1].offset
