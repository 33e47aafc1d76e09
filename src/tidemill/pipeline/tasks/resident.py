"""Resident executors: copies of one program that stay alive and receive task after task over their pipes.

`core.pipeline.residents` decides which copy gets which task and when copies start. `framing` encodes and decodes;
`executor` starts, limits, signals and reaps the processes. This module decides what a copy's answer or end means for
its tasks. Tasks that name another program run as processes of their own.

Invariants: `done` is called exactly once per task, on the loop, never inside `start`, and not at all after `kill`. A
copy that was out of step (an invalid answer, or one to another request) or exceeded a limit is killed and never used
again. Its task ends only after that process has exited, so that the next attempt does not overlap with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

import structlog

from tidemill.config.redaction import redact_text
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.core.pipeline.residents import CopyEnding, Effect, Give, Residents, RetireCopy, StartCopy
from tidemill.core.retry import Backoff
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.executor import Executor
from tidemill.pipeline.tasks.framing import FramingError, ResidentAnswer, TooMuchError, make_framing
from tidemill.pipeline.tasks.process import Done, Process, ProcessOutcome, TaskExecutor, check_limit
from tidemill.pipeline.tasks.resident_process import Copy, Job, Tail
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)

#: The delay before the next start after copies that exited before their first answer.
RESTARTS = Backoff(0.2, 30.0, 2.0)
#: How long a retired copy may take to exit after its input is closed.
LEAVE_SECONDS = 1.0

_CHUNK_BYTES = 65536


def build_executor(settings: ExecutorSettings, engine_id: str, environ: Mapping[str, str] = os.environ) -> TaskExecutor:
    """Return the executor of an engine, according to `executor.mode`."""
    executor = Executor(settings, engine_id, environ)
    return ResidentExecutor(settings, executor) if settings.mode == "resident" else executor


class ResidentExecutor:
    """Runs tasks of one program in resident copies, and other tasks as processes.

    Args:
        settings: The program, its copies and their limits.
        executor: Starts and ends processes; opened and closed with this executor.
    """

    def __init__(self, settings: ExecutorSettings, executor: Executor) -> None:
        self._executor = executor
        self._program = settings.binary_path
        self._argv = (settings.binary_path, *settings.resident.args)
        self._max_stdout_bytes = settings.max_stdout_bytes
        self._max_stderr_bytes = settings.max_stderr_bytes
        self._framing = make_framing(settings.resident.framing, settings.max_stdout_bytes)
        self._residents: Residents[Job] = Residents(
            settings.max_executors, settings.resident.recycle_after_tasks, RESTARTS, settings.resident.send_ahead
        )
        #: How many tasks it accepts at once: those that copies are working on, and those sent ahead.
        self.capacity = settings.max_executors * (1 + settings.resident.send_ahead)
        self._alone = settings.resident.send_ahead > 0
        #: The copies with requests to write. Each write wakes a copy, so the requests of one loop turn are written
        #: together.
        self._to_write: list[Copy] = []
        self._copies: dict[int, Copy] = {}
        self._alive: set[Copy] = set()  # including retired ones
        self._jobs: set[Job] = set()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._last_words = ""
        self._gone = asyncio.Event()
        self._closing = False

    def open(self) -> None:
        """Attach the executor to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._executor.open()

    @property
    def running(self) -> int:
        """The number of tasks that were started and have not been reported."""
        return len(self._jobs)

    @property
    def pids(self) -> list[int]:
        """The process ids of the copies."""
        return [copy.process.pid for copy in self._alive if copy.process is not None and copy.process.pid is not None]

    def start(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_seconds: float, done: Done
    ) -> object:
        """Give a task to a copy, or start a process for another program; see `Executor.start`."""
        is_other = not argv or argv[0] != self._program
        if is_other and not self._alone:
            return self._executor.start(argv, stdin, env, timeout_seconds, done)
        job = Job(next(self._numbers), timeout_seconds, done)
        self._jobs.add(job)
        try:
            check_limit(timeout_seconds)
            self._refuse_others(is_other, env)
            job.request = self._framing.make_request(job.number, argv[1:], stdin)
        except Exception as error:  # any error concerns this task alone
            refused = ProcessOutcome(None, b"", b"", 0.0, None, ErrorKind.EXIT, f"cannot be started: {error}")
            self._loop.call_soon(self._tell, job, refused)
            return job
        self._apply(self._residents.submit(job, time.monotonic()))
        return job

    def _refuse_others(self, is_other: bool, env: Mapping[str, str]) -> None:
        if is_other:  # send-ahead would start more processes than there are slots
            raise ValueError("a task may name another program only if executor.resident.send_ahead is 0")
        if env:
            raise ValueError("tasks of a resident program cannot set env; set executor.env instead")

    def describe_wait(self) -> str | None:
        """Return a description if copies exit before their first answer, None otherwise."""
        count = self._residents.failed_starts
        if not count:
            return None
        return f"{self._program} exited before its first answer, {count} times in a row ({self._last_words})"

    async def kill(self, tasks: Iterable[object], grace_seconds: float) -> None:
        """Kill these tasks and their copies: SIGTERM, the grace period, SIGKILL; no outcome is reported."""
        handles = list(tasks)
        jobs = [each for each in handles if isinstance(each, Job) and each in self._jobs]
        for job in jobs:
            self._jobs.discard(job)
            job.done = None
            self._residents.withdraw(job)
        processes = [each for each in handles if isinstance(each, Process)]
        copies = {job.copy for job in jobs if job.copy is not None}
        processes += [each for copy in copies for each in self._given_up(copy)]
        await self._executor.kill(processes, grace_seconds)
        # The copies' other tasks are not to blame; they run again, now that the processes have exited.
        for job in [job for copy in copies for job in copy.jobs if job in self._jobs]:
            job.copy = None
            self._apply(self._residents.submit(job, time.monotonic()))

    async def kill_all(self, grace_seconds: float) -> None:
        """Kill every task and every copy, as `kill` does; idle copies may first exit by themselves."""
        self._closing = True
        self._jobs.clear()
        for copy in self._alive:
            copy.close_input()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LEAVE_SECONDS, grace_seconds)):
                while not all(copy.jobs for copy in self._alive):
                    self._gone.clear()
                    await self._gone.wait()
        for copy in list(self._alive):
            self._given_up(copy)
        await self._executor.kill_all(grace_seconds)

    def _given_up(self, copy: Copy) -> list[Process]:
        """Forget a copy; return its process if that still has to be killed."""
        copy.close()
        self._alive.discard(copy)
        self._copies.pop(copy.number, None)
        self._apply(self._residents.drop(copy.number, time.monotonic()))
        return [copy.process] if copy.process is not None else []

    def close(self) -> None:
        """Detach from the loop; processes that still run get SIGKILL and are not reported."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for copy in list(self._alive):
            self._given_up(copy)
        self._jobs.clear()
        self._executor.close()

    # -- effects of core ------------------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect[Job]]) -> None:
        if self._closing:
            return
        for effect in effects:
            if isinstance(effect, Give):
                self._give(self._copies[effect.copy], effect.task)
            elif isinstance(effect, StartCopy):
                self._begin(effect.copy, effect.task)
            elif isinstance(effect, RetireCopy):
                self._retire(self._copies.pop(effect.copy))
            elif self._timer is None:
                self._timer = self._loop.call_later(max(0.0, effect.at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._residents.tick(time.monotonic()))

    def _begin(self, number: int, job: Job) -> None:
        copy = Copy(number, self._framing.make_reader(), Tail(self._max_stderr_bytes), self._loop, self._input_broke)
        self._copies[number] = copy
        self._alive.add(copy)
        try:
            theirs = copy.open_pipes()
        except OSError as error:  # the host lacks a resource now, which is not the task's fault
            copy.jobs.append(job)
            self._loop.call_soon(self._ended, copy, ProcessOutcome(None, b"", b"", 0.0, None, None, str(error)))
            return
        copy.process = self._executor.attach(self._argv, theirs, lambda outcome: self._ended(copy, outcome))
        for fd in theirs:
            os.close(fd)
        if copy.process.pid is None:  # the executor reports the reason in the next turn
            copy.jobs.append(job)
            return
        self._loop.add_reader(copy.stderr_fd, copy.read_stderr)
        self._loop.add_reader(copy.stdout_fd, self._read, copy)
        self._give(copy, job)

    def _give(self, copy: Copy, job: Job) -> None:
        job.copy = copy
        copy.jobs.append(job)
        copy.unwritten.append(job.request)
        if len(copy.jobs) == 1:
            self._work(copy, job, time.monotonic())
        if not self._alone:  # without send-ahead a copy has one task at a time
            self._write(copy)
        elif len(copy.unwritten) == 1:
            if not self._to_write:
                self._loop.call_soon(self._write_all)
            self._to_write.append(copy)

    def _write_all(self) -> None:
        to_write, self._to_write = self._to_write, []
        for copy in to_write:
            if copy.unwritten and copy.failure is None:
                self._write(copy)

    def _write(self, copy: Copy) -> None:
        """Write the requests of a copy's latest tasks."""
        requests, copy.unwritten = copy.unwritten, []
        assert copy.process is not None
        try:
            copy.send(requests)
        except OSError:  # usually because the copy has exited
            self._executor.send_signal(copy.process, signal.SIGKILL)
            if copy.answered and len(copy.jobs) == len(requests):
                self._give_back(copy)

    def _give_back(self, copy: Copy) -> None:
        """Reassign the tasks of a copy that exited while idle and has read none of them."""
        for job in copy.jobs:
            job.copy = None
        copy.jobs.clear()
        del self._copies[copy.number]
        self._apply(self._residents.note_undelivered(copy.number, time.monotonic()))

    def _work(self, copy: Copy, job: Job, now: float) -> None:
        """Start the clock of the task at the head of a copy's queue."""
        job.started_at = now
        self._executor.limit(copy.process, job.timeout_seconds, now)  # type: ignore[arg-type]  # it has one

    def _retire(self, copy: Copy) -> None:
        copy.leaving = True
        copy.close_input()
        assert copy.process is not None
        self._executor.limit(copy.process, LEAVE_SECONDS, time.monotonic())

    # -- events of copies -----------------------------------------------------------------------------------------

    def _read(self, copy: Copy) -> bool:
        """Read one chunk of a copy's answers; return whether more may be available now."""
        try:
            chunk = os.read(copy.stdout_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        assert copy.process is not None
        if not chunk:
            copy.close_output()
            if not copy.leaving:  # it can never answer again
                self._kill(copy)
            return False
        if copy.leaving or copy.failure is not None or copy.process.failure is not None:
            return True  # too late to count
        try:
            self._take(copy, chunk)
        except TooMuchError:
            self._condemn(copy, f"more than {self._max_stdout_bytes} bytes of stdout (executor.max_stdout_bytes)")
        except FramingError as error:
            self._condemn(copy, f"the resident program is out of step: {error}")
        return True

    def _take(self, copy: Copy, chunk: bytes) -> None:
        answers = copy.reader.feed(chunk)
        asked = len(copy.jobs) - len(copy.unwritten)
        # Check all before accepting any: a stray line makes the answers around it doubtful.
        for answer, job in itertools.zip_longest(answers, itertools.islice(copy.jobs, min(asked, len(answers)))):
            if job is None:
                raise FramingError(f"it wrote output without a request: {chunk[:200]!r}")
            if answer.id != job.number:
                raise FramingError(f"it answered request {answer.id} instead of {job.number}")
        if copy.reader.is_amid and len(answers) == asked:
            raise FramingError(f"it wrote output without a request: {chunk[-200:]!r}")
        if len(copy.unsent) > asked - len(answers):
            raise FramingError("it answered before it had read its whole request")
        for answer in answers:
            self._answered(copy, answer)
        self._write_all()

    def _answered(self, copy: Copy, answer: ResidentAnswer) -> None:
        now = time.monotonic()
        job = copy.jobs.popleft()
        stderr = copy.stderr.take() + answer.stderr.encode("utf-8", "replace")
        copy.answered = True
        assert copy.process is not None
        if copy.jobs:
            self._work(copy, copy.jobs[0], now)
        else:
            copy.process.deadline = math.inf
        kind = None if answer.exit_code == 0 else ErrorKind.EXIT
        outcome = ProcessOutcome(
            answer.exit_code, answer.stdout, stderr, now - job.started_at, copy.process.pid, kind, None
        )
        # First, so that the copy is free for the tasks that `done` starts.
        self._apply(self._residents.note_answer(copy.number, now))
        self._tell(job, outcome)

    def _input_broke(self, copy: Copy) -> None:
        if not copy.leaving and copy.failure is None:
            self._condemn(copy, "the resident program closed its input before it had read its task", ErrorKind.EXIT)

    def _condemn(self, copy: Copy, text: str, kind: ErrorKind = ErrorKind.OUTPUT) -> None:
        copy.failure = (kind, text)
        throttle(log, 10.0).warning("a resident program is replaced", program=self._program, reason=redact_text(text))
        self._kill(copy)

    def _kill(self, copy: Copy) -> None:
        assert copy.process is not None
        self._executor.send_signal(copy.process, signal.SIGKILL)
        if not copy.jobs and self._copies.pop(copy.number, None) is not None:
            # Report the end now, not when the process exits, so that the copy gets no further task.
            self._apply(self._residents.note_ended(copy.number, CopyEnding.DIED, time.monotonic()))

    def _ended(self, copy: Copy, outcome: ProcessOutcome) -> None:
        while copy.stdout_fd >= 0 and outcome.pid is not None and self._read(copy):
            pass  # an answer that arrived together with the exit counts
        copy.read_stderr()
        # A working copy that exited before it was sent any of its tasks: other copies can run them.
        was_idle = copy.answered and len(copy.unwritten) == len(copy.jobs) > 0 and copy.number in self._copies
        copy.close()
        self._alive.discard(copy)
        self._gone.set()
        if was_idle:
            self._give_back(copy)
            return
        self._copies.pop(copy.number, None)
        died = outcome.exit_code is not None and outcome.kind is not ErrorKind.TIMEOUT and not copy.leaving
        stderr = copy.stderr.take()
        if died and not copy.answered:
            self._failed_start(copy, outcome, stderr)
        job = copy.jobs.popleft() if copy.jobs else None
        for behind in copy.jobs:
            behind.copy = None
        copy.jobs.clear()
        now = time.monotonic()
        self._apply(self._residents.note_ended(copy.number, CopyEnding.DIED if died else CopyEnding.STOPPED, now))
        if job is not None:
            outcome.duration_seconds = now - job.started_at if job.started_at else 0.0
            self._tell(job, copy.fail_task(outcome, stderr) if died else outcome)

    def _failed_start(self, copy: Copy, outcome: ProcessOutcome, stderr: bytes) -> None:
        said = (
            (copy.failure and copy.failure[1])
            or stderr.decode("utf-8", "replace").strip()[-200:]
            or "it wrote nothing to stderr"
        )
        self._last_words = f"exit code {outcome.exit_code}: {redact_text(said)}"
        throttle(log, 10.0).error(
            "a resident program exited before its first answer; the next start is delayed",
            program=self._program,
            ended=self._last_words,
        )

    def _tell(self, job: Job, outcome: ProcessOutcome) -> None:
        self._jobs.discard(job)
        done, job.done = job.done, None
        if done is None or self._closing:
            return
        try:
            done(outcome)
        except Exception as error:  # an error of the caller must not keep other tasks from being reported
            self._loop.call_exception_handler(
                {"message": "the done callback of a resident task raised", "exception": error}
            )
