"""The driver's side of a bounded run: one ordinary Spark job, whose tasks' engines report over their links.

Invariants: published outcomes, and nothing in this module, decide which parts are done. An engine is told to begin at
once, and refused if the run is stopping. An engine that has gone silent (`core.supervision.silence` decides) is killed
through Spark, which restarts its part; a part that hangs repeatedly ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import msgspec
import structlog

from tidemill.core.errors import TidemillError, TooManyFailuresError
from tidemill.core.supervision.silence import Hung, SilenceWatch
from tidemill.runtime.link.frames import (
    BeginFrame,
    Command,
    DrainFrame,
    ExitFrame,
    GoFrame,
    HelloFrame,
    LinkAddress,
    RefusedFrame,
    WelcomeFrame,
)
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.runtime.link.server import LinkServer
from tidemill.spark.bounded.recording import BoundedRecorder
from tidemill.spark.bounded.task import ChunkResult
from tidemill.spark.live.jobs import describe_failure, make_engine_error
from tidemill.spark.progress import PipelineProgress, sum_progress
from tidemill.spark.session.conf import is_local_context

if TYPE_CHECKING:
    from pyspark import SparkContext

log = structlog.get_logger(__name__)

#: An engine that is silent for this long counts as hung.
SILENT_SECONDS = 15.0
_TICK_SECONDS = 1.0


class BoundedProgress(PipelineProgress):
    """The sums over all engines of a bounded run.

    Attributes:
        total: The number of offsets or rows to process; 0 if unknown.
        passed: How many of them are done.
        parts: The number of parts of the run.
        parts_done: How many of them are done.
    """

    total: int = 0
    passed: int = 0
    parts: int = 0
    parts_done: int = 0


class BoundedRun:
    """The driver's side of a bounded run: admits engines, adds up their progress, and stops them.

    Use it in a `with` block. Reports of links change state on the link's loop only; any thread may read the state.

    Args:
        context: The Spark context of the tasks.
        sizes: The number of messages in each part; empty if unknown.
        before: How many messages earlier runs have processed.
        recorder: Records what engines send; None: nothing is recorded.
    """

    def __init__(
        self,
        context: SparkContext,
        sizes: Sequence[int] = (),
        before: int = 0,
        recorder: BoundedRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._context = context
        self._sizes = sizes
        self._before = before
        self._links: dict[int, int] = {}
        self._hellos: dict[int, HelloFrame] = {}
        self._watch = SilenceWatch(SILENT_SECONDS, _TICK_SECONDS)
        self._tokens = 0
        self._running: dict[int, EngineProgress] = {}
        self._past = PipelineProgress()
        self._done: set[int] = set()
        self._failures: dict[int, str] = {}
        self._stopping = False
        self._hopeless: int | None = None
        self._on_stopped: Callable[[], None] = _nothing
        self._callers = ThreadPoolExecutor(1, "tidemill-cancel")

    def __enter__(self) -> Self:
        """Listen for engines.

        Raises:
            RemoteError: The link's address cannot be listened on.
        """
        local = is_local_context(self._context)
        host = "127.0.0.1" if local else str(self._context.getConf().get("spark.driver.host"))
        open_link = LinkServer if self._recorder is None else self._recorder.open_link
        self._server = open_link(self, bind_host=host)
        self.address: LinkAddress = self._server.start()
        self._server.loop.call_soon_threadsafe(self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        """Close all links."""
        self._callers.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def results(self, collect: Callable[[], Sequence[bytes]]) -> list[ChunkResult]:
        """Run the Spark job and return the results of its tasks.

        Args:
            collect: Runs the job, in this thread.

        Raises:
            TidemillError: A task failed repeatedly; the message is its engine's.
        """
        try:
            encoded = collect()
        except Exception as error:
            if self._stopping:
                return []
            failures = sorted(self._failures.items(), key=lambda each: each[0] == self._hopeless)
            if failures:
                index, said = failures[-1]
                raise make_engine_error(f"range {index}", said) from error
            raise TidemillError(f"the Spark job failed: {describe_failure(error)}") from error
        return [msgspec.msgpack.decode(part, type=ChunkResult) for part in encoded]

    def drain(self, on_stopped: Callable[[], None]) -> None:
        """Let running engines finish work in flight, and start no others.

        Args:
            on_stopped: Called in another thread once no engine is left; it must end the job, because Spark would keep
                starting tasks.
        """

        def stop() -> None:
            self._stopping = True
            self._on_stopped = on_stopped
            self._tell_all(DrainFrame())
            self._look()

        self._server.loop.call_soon_threadsafe(stop)

    def exit_now(self) -> None:
        """Make every engine's process exit now; their wardens clean up."""

        def stop() -> None:
            self._stopping = True
            self._tell_all(ExitFrame())

        self._server.loop.call_soon_threadsafe(stop)

    @property
    def greeted(self) -> bool:
        """Whether any engine has ever connected."""
        return self._tokens > 0

    def progress(self) -> BoundedProgress:
        """Return the progress of all engines, including ended ones."""
        running = dict(self._running)
        total = sum_progress([self._past], list(running.values()))
        progress = BoundedProgress(**{name: getattr(total, name) for name in total.__struct_fields__})
        sizes, done = self._sizes, set(self._done)
        progress.parts, progress.parts_done = len(sizes), len(done)
        progress.total = self._before + sum(sizes)
        progress.passed = self._before + sum(sizes[index] for index in done if index < len(sizes))
        for link, part in running.items():
            index = self._links.get(link, len(sizes))
            if index < len(sizes) and index not in done:
                progress.passed += min(sizes[index], part.messages_done)
        return progress

    # -- reports of engines, on the link's loop -----------------------------------------------------------------

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        """Let an engine begin at once, unless the run is stopping or has failed for good."""
        if (self._stopping or self._hopeless is not None) and not hello.run_token:
            # Spark restarts a failed part, which would dead-letter the same messages again.
            self._server.send(link, RefusedFrame("the run is being stopped"))
            self._server.close_link(link)
            return
        self._links[link] = hello.slot
        self._hellos[link] = hello
        self._watch.note_joined(link, hello.slot, time.monotonic())
        self._tokens += 1
        self._server.send(link, WelcomeFrame(hello.run_token or self._tokens))
        for command in (BeginFrame(), GoFrame()):
            self._server.send(link, command)
        if self._stopping:
            self._server.send(link, DrainFrame())

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        """Store the engine's progress."""
        self._running[link] = progress
        self._watch.note_heartbeat(link, time.monotonic())

    def on_ready(self, link: int) -> None:
        """Ignore it: bounded engines need no permission to go on."""

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        """Store an engine's summary, and record whether its part is done."""
        self._watch.note_left(link)
        self._running[link] = summary.progress
        if summary.reason is not StopReason.DRAINED:
            said = summary.error or summary.reason.value
            self._note_failure(summary.slot, said)
            if said.startswith(TooManyFailuresError.__name__):
                self._hopeless = summary.slot
            log.warning("a range failed", range=summary.slot, error=summary.error)
        elif not self._stopping:
            self._failures.pop(summary.slot, None)
            self._done.add(summary.slot)

    def on_closed(self, link: int) -> None:
        """Remove an engine, and keep its last progress."""
        self._watch.note_left(link)
        self._links.pop(link, None)
        self._hellos.pop(link, None)
        last = self._running.pop(link, None)
        if last is not None:
            self._past = sum_progress([self._past, last], [])
        self._look()

    def _note_failure(self, part: int, text: str) -> None:
        """Store the failure of a part as the latest one."""
        self._failures.pop(part, None)
        self._failures[part] = text

    def _tick(self) -> None:
        for hung in self._watch.tick(time.monotonic()):
            self._kill(hung)
        self._server.loop.call_later(_TICK_SECONDS, self._tick)

    def _kill(self, hung: Hung) -> None:
        hello = self._hellos[hung.link]
        text = f"its engine was silent for {SILENT_SECONDS:g} s"
        self._note_failure(hung.part, f"{text}, {hung.times} times" if hung.times > 1 else text)
        log.error(
            "an engine hangs; "
            + ("giving up the run" if hung.give_up else "killing it, so that Spark restarts its range"),
            range=hung.part,
            host=hello.host,
            process=hello.pid,
            silent_seconds=SILENT_SECONDS,
            times=hung.times,
        )
        self._server.close_link(hung.link)
        self._callers.submit(self._end_task, hello, give_up=hung.give_up)

    def _end_task(self, hello: HelloFrame, *, give_up: bool) -> None:
        """Kill a task, or cancel its stage to fail the job."""
        try:
            spark = self._context._jsc.sc()  # the Python API offers neither call
            if give_up:
                spark.cancelStage(hello.stage)
            else:
                spark.killTaskAttempt(hello.attempt, True, "its engine hangs")
        except Exception as error:
            log.warning("cannot kill the task of a hung engine", range=hello.slot, error=describe_failure(error))

    def _tell_all(self, command: Command) -> None:
        with self._server.together():
            for link in self._links:
                self._server.send(link, command)

    def _look(self) -> None:
        if self._stopping and not self._links:
            on_stopped, self._on_stopped = self._on_stopped, _nothing
            self._callers.submit(on_stopped)


def _nothing() -> None:
    pass
