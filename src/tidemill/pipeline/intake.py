"""The way into an engine: takes messages from the source as backpressure leaves room, and closes windows.

Holds the lanes of the owned partitions. Of those the pump visits only the ones with news (messages that arrived, or
room for messages that wait): a lane without any costs nothing. A message that cannot be read is dead-lettered here;
every other one ends up in exactly one window, in order. Once stopped, nothing more is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from tidemill.core.errors import describe_error
from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.backpressure import Backpressure
from tidemill.core.pipeline.window import Window
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.key_order import OrderedTasks
from tidemill.pipeline.partition import Opened, OwnedPartition
from tidemill.pipeline.window import WindowRun
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine
    from tidemill.pipeline.tasks.pool import TaskRun


#: Results that wait for sinks, per engine, beyond which it reads no more: several times what a sink takes at once.
#: Many more of them make nothing faster, and leave the processor's caches before they are confirmed.
MAX_UNDELIVERED = 4_000


class Intake:
    """The lanes of an engine, and the pump that fills them.

    Args:
        engine: Whose messages these are.
    """

    def __init__(self, engine: Engine) -> None:
        """Start stopped, without lanes."""
        limits = engine.settings.executor
        self._engine = engine
        self._limits = limits
        self._load: Backpressure[TopicPartition] = Backpressure(
            limits.max_executors * limits.backpressure_high_multiplier,
            limits.max_executors * limits.backpressure_low_multiplier,
            limits.window_size,
            limits.max_queued_bytes,
            limits.max_uncommitted,
            MAX_UNDELIVERED,
        )
        # What is staged for a transaction waits for messages before it, not for a sink.
        self._counts_results = engine.outbox.stage is None
        self.lanes: dict[TopicPartition, OwnedPartition] = {}
        #: Messages of all lanes that did not leave the pipeline yet.
        self.in_flight = 0
        self._names: list[str] | None = []
        # What the pump has to visit, in turn; and what it found without room, until that is looked at again.
        self._news: dict[TopicPartition, OwnedPartition] = {}
        self._starved: dict[TopicPartition, OwnedPartition] = {}
        self._parking: dict[TopicPartition, OwnedPartition] = {}
        self._shares_grew = False
        self._pumping = False
        self._open = False
        self._paused = False
        self._braked = False
        self._wants_one = False

    # -- which partitions -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take messages, of partitions that are assigned from now on."""
        self._loop = asyncio.get_running_loop()
        self._open = True

    def stop(self) -> None:
        """Take nothing more; what was taken becomes windows."""
        self._open = False
        for lane in self.lanes.values():
            self._close_window(lane, lane.windowing.flush())

    def pause(self) -> None:
        """Take nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Take messages again."""
        self._paused = False
        self._soon()

    def brake(self, on: bool) -> None:
        """Take nothing but what `take_one` asks for; or take messages again."""
        self._braked, self._wants_one = on, False
        self._soon()

    def take_one(self) -> None:
        """Take one message although the brake is on, as soon as there is one."""
        self._wants_one = True
        self._soon()

    def assign(self, partition: TopicPartition) -> None:
        """Take a partition on."""
        lane = self.lanes[partition] = OwnedPartition(partition, self._limits)
        self._names = None
        if self._limits.order_by == "key":
            lane.order = OrderedTasks(partial(self._waits, lane), hooked=self._engine.has.on_message_complete)
        self._load.assign(partition)
        self._visit(lane)

    def forget(self, lane: OwnedPartition) -> None:
        """Drop a closed lane."""
        if self.lanes.pop(lane.partition, None) is not None:
            self.in_flight -= lane.unresolved
            self._names = None
        for waiting in (self._news, self._starved, self._parking):
            waiting.pop(lane.partition, None)
        self._load.revoke(lane.partition)
        self._shares_grew = True
        self._soon()

    @property
    def busy(self) -> bool:
        """Whether something is in hand."""
        return any(lane.busy for lane in self.lanes.values())

    @property
    def names(self) -> list[str]:
        """The names of all lanes; the list is replaced when they change."""
        if self._names is None:
            self._names = [lane.name for lane in self.lanes.values()]
        return self._names

    @property
    def paused(self) -> list[str]:
        """The names of the partitions that backpressure holds."""
        for lane in [lane for lane in self._starved.values() if self._room(lane)]:
            del self._starved[lane.partition]
        return [lane.name for lane in self._starved.values()]

    @property
    def held_back(self) -> int:
        """How many tasks wait until less of their partition waits for sinks, or for their key."""
        lanes = self.lanes if self._limits.order_by == "key" else self._parking
        return sum(lane.held_back for lane in lanes.values())

    def _room(self, lane: OwnedPartition) -> int:
        undelivered = lane.undelivered if self._counts_results else 0
        return self._load.room(lane.partition, lane.undelivered_bytes, undelivered)

    # -- how much ---------------------------------------------------------------------------------------------

    def finished(self, lane: OwnedPartition) -> None:
        """Count a message whose tasks are over: it no longer counts against the watermarks."""
        self._load.finished(lane.partition, 1, 0)
        self._refill(lane)

    def resolved(self, lane: OwnedPartition, message: SourceMessage) -> None:
        """Count a message out: its bytes are let go."""
        self.in_flight -= 1
        self._load.finished(lane.partition, 0, message.size_bytes)
        self._refill(lane)

    def delivered(self, lane: OwnedPartition, size_bytes: int) -> None:
        """Count a result out that waited for its sink."""
        lane.undelivered -= 1
        self._let_go(lane, size_bytes)

    def _let_go(self, lane: OwnedPartition, size_bytes: int) -> None:
        """Let go on what waited for the bytes of results."""
        lane.undelivered_bytes -= size_bytes
        if lane.parked and not self.is_full(lane):
            parked, lane.parked = lane.parked, []
            self._parking.pop(lane.partition, None)
            for run in parked:
                self._engine.pool.submit(run)
        if lane.starved:
            self._refill(lane)

    def _waits(self, lane: OwnedPartition, count: int) -> None:
        """Count messages that wait for their key, or ceased to: meanwhile they do not count against the watermarks."""
        self._load.waits(lane.partition, count)
        if lane.held:
            self._engine.count_stuck(lane)
        if count > 0:
            self._refill(lane)

    def charge(self, partition: TopicPartition, size_bytes: int) -> None:
        """Count bytes that a partition has more, or fewer, staged for its next transaction."""
        lane = self.lanes.get(partition)
        if lane is not None:
            self._let_go(lane, -size_bytes)

    def is_full(self, lane: OwnedPartition) -> bool:
        """Tell whether so much of a partition waits for sinks that none of its tasks may start.

        Never with transactions: what is staged may wait for the very tasks that would be held.
        """
        if self._engine.outbox.stage is not None:
            return False
        return lane.undelivered_bytes * len(self.lanes) >= self._limits.max_queued_bytes

    def park(self, run: TaskRun) -> None:
        """Hold a task until less of its partition waits for sinks."""
        lane = run.window.lane
        lane.parked.append(run)
        self._parking[lane.partition] = lane

    def committed(self, partition: TopicPartition, count: int) -> None:
        """Count messages that a commit passed."""
        self._load.committed(partition, count)
        lane = self.lanes.get(partition)
        if lane is not None:
            self._refill(lane)

    def _refill(self, lane: OwnedPartition) -> None:
        if lane.partition not in self._news and self._engine.source.buffered(lane.partition):
            self._visit(lane)

    # -- the pump ---------------------------------------------------------------------------------------------

    def arrived(self, partitions: Collection[TopicPartition]) -> None:
        """Take messages of partitions in the next turn of the loop."""
        for partition in partitions:
            lane = self.lanes.get(partition)
            if lane is not None:
                self._visit(lane)

    def _visit(self, lane: OwnedPartition) -> None:
        self._news[lane.partition] = lane
        self._soon()

    def _soon(self) -> None:
        if not self._pumping and self._open:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Take from every partition with news what backpressure leaves room for, a window at a time in turn."""
        self._pumping = False
        if self._paused or not self._open:
            return
        if self._shares_grew:
            self._shares_grew = False
            self._news |= self._starved
        if self._braked:
            self._try_one()
            return
        pull, window_size = self._engine.source.pull, self._limits.window_size
        hungry = [lane for lane in self._news.values() if lane.handover is None]
        self._news.clear()
        while hungry:
            still = []
            for lane in hungry:
                room = self._room(lane)
                self._note_room(lane, room)
                messages = pull(lane.partition, min(room, window_size)) if room > 0 else []
                if messages:
                    self._accept(lane, messages)
                    still.append(lane)
                else:
                    self._close_window(lane, lane.windowing.idle(self._loop.time()))
            hungry = still

    def _note_room(self, lane: OwnedPartition, room: int) -> None:
        lane.starved = room <= 0
        if lane.starved:
            self._starved[lane.partition] = lane
        else:
            self._starved.pop(lane.partition, None)

    def _try_one(self) -> None:
        """Take the message that the brake wants to try, if it wants one and there is one."""
        for lane in self.lanes.values() if self._wants_one else ():
            if lane.handover is not None or self._room(lane) <= 0:
                continue
            messages = self._engine.source.pull(lane.partition, 1)
            if messages and self._engine.brake is not None:
                self._wants_one = False
                self._engine.brake.taken(lane, messages[0].offset)
                self._accept(lane, messages)
                self._close_window(lane, lane.windowing.flush())
                return

    def _accept(self, lane: OwnedPartition, messages: list[SourceMessage]) -> None:
        now = self._loop.time()
        partition = lane.partition
        self._engine.counters.consumed += len(messages)
        lane.unresolved += len(messages)
        self.in_flight += len(messages)
        self._load.handed(partition, len(messages), sum(message.size_bytes for message in messages))
        for message in messages:
            entry = self._engine.commits.open(partition, message.offset)
            if self._parsed(lane, message, entry):
                self._close_window(lane, lane.windowing.add((message, entry), message.size_bytes, now))
        self._set_linger(lane)

    def _parsed(self, lane: OwnedPartition, message: SourceMessage, entry: LedgerEntry[TopicPartition, int]) -> bool:
        """Set the payload; a message that cannot be read is dead-lettered and takes no further part."""
        engine = self._engine
        if message.value is None:
            if engine.handler.accept_tombstones:
                return True
            engine.reject(lane, message, entry, LetterKind.TOMBSTONE, "the handler does not accept tombstones")
            return False
        try:
            message.payload = engine.handler.deserialize_message(message)
        except (Exception, SystemExit) as error:
            text = describe_error(error)
            if engine.settings.kafka.on_parse_error == "pass":
                message.parse_error = text
                return True
            if engine.brake is None:
                engine.reject(lane, message, entry, LetterKind.PARSE, text)
            else:  # in a window of its own it keeps its place, whether it is dead-lettered or held
                self._close_window(lane, lane.windowing.flush())
                self.arrange_soon(WindowRun(engine, lane, [message], [entry], self._loop.time(), is_parsed=False))
            return False
        return True

    # -- windows ----------------------------------------------------------------------------------------------

    def _set_linger(self, lane: OwnedPartition) -> None:
        due = lane.windowing.due
        if due is not None and lane.linger is None:
            lane.linger = self._loop.call_at(due, self._linger_over, lane)

    def _linger_over(self, lane: OwnedPartition) -> None:
        lane.linger = None
        if not lane.closed:
            self._close_window(lane, lane.windowing.expire(self._loop.time()))
            self._set_linger(lane)

    def _close_window(self, lane: OwnedPartition, window: Window[Opened] | None) -> None:
        if window is None:
            return
        messages = [message for message, _ in window.items]
        entries = [entry for _, entry in window.items]
        self.arrange_soon(WindowRun(self._engine, lane, messages, entries, self._loop.time()))

    def arrange_soon(self, window: WindowRun) -> None:
        """Let a window be arranged after those of its partition that wait for that already."""
        lane = window.lane
        lane.waiting.append(window)
        if not lane.arranging:
            lane.arranging = True
            self._engine.hooks.submit(self._arrange, lane)

    async def _arrange(self, lane: OwnedPartition) -> None:
        try:
            while lane.waiting:
                lane.arranged = lane.waiting.popleft()
                await lane.arranged.arrange()
                lane.arranged = None
        finally:
            lane.arranging = False
