"""Resident executors: copies of one program that stay alive and are fed task after task over their pipes.

`core.pipeline.residents` decides which copy gets which task and when copies are started; `framing` knows the bytes;
`executor` starts, limits, signals and reaps the processes. Here is what a copy's answer or end means for the task
that it had. Tasks that name another program run as processes of their own.

Invariants: `done` is called exactly once per task, on the loop, never inside `start`, and not at all after `kill`. A
copy that was out of step (an answer that is invalid, or for another request) or over its limits is killed and never
used again; the task that it had ends when that process is gone, so that nothing runs beside its next try.
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

from tidemill.config.executor_settings import ExecutorSettings
from tidemill.config.redaction import redact_text
from tidemill.core.pipeline.residents import Effect, Ending, Give, Residents, Retire, Start
from tidemill.core.retry import Backoff
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.executor import Executor
from tidemill.pipeline.tasks.framing import FramingError, ResidentAnswer, TooMuchError, make_framing
from tidemill.pipeline.tasks.process import Done, ProcessOutcome, Run, TaskExecutor, check_limit
from tidemill.pipeline.tasks.resident_process import Copy, Job, Tail
from tidemill.runtime.log import throttle

log = structlog.get_logger(__name__)

#: How long the next start waits after copies that ended before their first answer.
RESTARTS = Backoff(0.2, 30.0, 2.0)
#: How long a copy that is no longer needed may take to end by itself once its input has ended.
LEAVE_SECONDS = 1.0

_CHUNK_BYTES = 65536


def build_executor(settings: ExecutorSettings, engine_id: str, environ: Mapping[str, str] = os.environ) -> TaskExecutor:
    """Return what runs an engine's tasks, as `executor.mode` says."""
    executor = Executor(settings, engine_id, environ)
    return ResidentExecutor(settings, executor) if settings.mode == "resident" else executor


class ResidentExecutor:
    """Runs tasks of one program in resident copies, and others as processes.

    Args:
        settings: The program, its copies and their limits.
        executor: Starts and ends processes; opened and closed with this.
    """

    def __init__(self, settings: ExecutorSettings, executor: Executor) -> None:
        """Start nothing yet."""
        self._executor = executor
        self._program = settings.binary_path
        self._argv = (settings.binary_path, *settings.resident.args)
        self._max_stdout_bytes = settings.max_stdout_bytes
        self._max_stderr_bytes = settings.max_stderr_bytes
        self._framing = make_framing(settings.resident.framing, settings.max_stdout_bytes)
        self._residents: Residents[Job] = Residents(
            settings.max_executors, settings.resident.recycle_after_tasks, RESTARTS, settings.resident.send_ahead
        )
        #: How many tasks it takes at a time: those that the copies work on, and those behind them.
        self.capacity = settings.max_executors * (1 + settings.resident.send_ahead)
        self._alone = settings.resident.send_ahead > 0
        #: The copies with requests to write: each write wakes a copy, so what comes together is written together.
        self._to_write: list[Copy] = []
        self._copies: dict[int, Copy] = {}
        self._alive: set[Copy] = set()  # those that are leaving included
        self._jobs: set[Job] = set()
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._last_words = ""
        self._gone = asyncio.Event()
        self._closing = False

    def open(self) -> None:
        """Join the running loop."""
        self._loop = asyncio.get_running_loop()
        self._executor.open()

    @property
    def running(self) -> int:
        """How many tasks were started and have not been reported."""
        return len(self._jobs)

    @property
    def pids(self) -> list[int]:
        """The processes of the program."""
        return [copy.run.pid for copy in self._alive if copy.run is not None and copy.run.pid is not None]

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
        except Exception as error:  # whatever it is, it concerns this task alone
            refused = ProcessOutcome(None, b"", b"", 0.0, None, ErrorKind.EXIT, f"cannot be started: {error}")
            self._loop.call_soon(self._tell, job, refused)
            return job
        self._apply(self._residents.submit(job, time.monotonic()))
        return job

    def _refuse_others(self, is_other: bool, env: Mapping[str, str]) -> None:
        if is_other:  # there would be as many processes as there may be tasks
            raise ValueError("with executor.resident.send_ahead no task may name another program")
        if env:
            raise ValueError("a resident program has its environment from executor.env, not from its tasks")

    def describe_stall(self) -> str | None:
        """Return that copies end before they answer anything, if so."""
        count = self._residents.failed_starts
        if not count:
            return None
        return f"{self._program} ended before its first answer, {count} times in a row ({self._last_words})"

    async def kill(self, runs: Iterable[object], grace_seconds: float) -> None:
        """End these tasks and the copies that have them: SIGTERM, the grace, SIGKILL; nothing is reported."""
        handles = list(runs)
        jobs = [run for run in handles if isinstance(run, Job) and run in self._jobs]
        for job in jobs:
            self._jobs.discard(job)
            job.done = None
            self._residents.withdraw(job)
        processes = [run for run in handles if isinstance(run, Run)]
        copies = {job.copy for job in jobs if job.copy is not None}
        processes += [run for copy in copies for run in self._given_up(copy)]
        await self._executor.kill(processes, grace_seconds)
        # Their other tasks are not to blame, and are run again now that the processes are gone.
        for job in [job for copy in copies for job in copy.jobs if job in self._jobs]:
            job.copy = None
            self._apply(self._residents.submit(job, time.monotonic()))

    async def kill_all(self, grace_seconds: float) -> None:
        """End every task, as `kill` does, and every copy; those without a task may end by themselves first."""
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

    def _given_up(self, copy: Copy) -> list[Run]:
        """Forget a copy; return what is left to be killed of it."""
        copy.close()
        self._alive.discard(copy)
        self._copies.pop(copy.number, None)
        self._apply(self._residents.drop(copy.number, time.monotonic()))
        return [copy.run] if copy.run is not None else []

    def close(self) -> None:
        """Leave the loop; what still runs gets SIGKILL and is not reported."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for copy in list(self._alive):
            self._given_up(copy)
        self._jobs.clear()
        self._executor.close()

    # -- what core decides ------------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect[Job]]) -> None:
        if self._closing:
            return
        for effect in effects:
            if isinstance(effect, Give):
                self._give(self._copies[effect.copy], effect.task)
            elif isinstance(effect, Start):
                self._begin(effect.copy, effect.task)
            elif isinstance(effect, Retire):
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
        except OSError as error:  # this host has no room now, which is not the task's fault
            copy.jobs.append(job)
            self._loop.call_soon(self._ended, copy, ProcessOutcome(None, b"", b"", 0.0, None, None, str(error)))
            return
        copy.run = self._executor.attach(self._argv, theirs, lambda outcome: self._ended(copy, outcome))
        for fd in theirs:
            os.close(fd)
        if copy.run.pid is None:  # the executor is about to say why
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
        if not self._alone:  # a copy has one task at a time
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
        assert copy.run is not None
        try:
            copy.send(requests)
        except OSError:  # mostly since nobody reads it any more
            self._executor.send_signal(copy.run, signal.SIGKILL)
            if copy.answered and len(copy.jobs) == len(requests):
                self._give_back(copy)

    def _give_back(self, copy: Copy) -> None:
        """Give the tasks of a copy that ended while it was idle, and saw none of them, to others."""
        for job in copy.jobs:
            job.copy = None
        copy.jobs.clear()
        del self._copies[copy.number]
        self._apply(self._residents.note_undelivered(copy.number, time.monotonic()))

    def _work(self, copy: Copy, job: Job, now: float) -> None:
        """Start the clock of the task that a copy works on first."""
        job.started_at = now
        self._executor.limit(copy.run, job.timeout_seconds, now)  # type: ignore[arg-type]  # it has one

    def _retire(self, copy: Copy) -> None:
        copy.leaving = True
        copy.close_input()
        assert copy.run is not None
        self._executor.limit(copy.run, LEAVE_SECONDS, time.monotonic())

    # -- what copies do ---------------------------------------------------------------------------------------

    def _read(self, copy: Copy) -> bool:
        """Read one chunk of a copy's answers; return whether more may be there now."""
        try:
            chunk = os.read(copy.stdout_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        assert copy.run is not None
        if not chunk:
            copy.close_output()
            if not copy.leaving:  # nothing can come of it any more
                self._kill(copy)
            return False
        if copy.leaving or copy.failure is not None or copy.run.failure is not None:
            return True  # too late
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
        # All are checked before any is accepted: a stray line makes those beside it doubtful.
        for answer, job in itertools.zip_longest(answers, itertools.islice(copy.jobs, min(asked, len(answers)))):
            if job is None:
                raise FramingError(f"it wrote without having a task: {chunk[:200]!r}")
            if answer.id != job.number:
                raise FramingError(f"it answered request {answer.id} instead of {job.number}")
        if copy.reader.is_amid and len(answers) == asked:
            raise FramingError(f"it wrote without having a task: {chunk[-200:]!r}")
        if len(copy.unsent) > asked - len(answers):
            raise FramingError("it answered before it had read all of its request")
        for answer in answers:
            self._answered(copy, answer)
        self._write_all()

    def _answered(self, copy: Copy, answer: ResidentAnswer) -> None:
        now = time.monotonic()
        job = copy.jobs.popleft()
        stderr = copy.stderr.take() + answer.stderr.encode("utf-8", "replace")
        copy.answered = True
        assert copy.run is not None
        if copy.jobs:
            self._work(copy, copy.jobs[0], now)
        else:
            copy.run.deadline = math.inf
        kind = None if answer.exit_code == 0 else ErrorKind.EXIT
        outcome = ProcessOutcome(
            answer.exit_code, answer.stdout, stderr, now - job.started_at, copy.run.pid, kind, None
        )
        # First, so that the copy is free for what `done` starts.
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
        assert copy.run is not None
        self._executor.send_signal(copy.run, signal.SIGKILL)
        if not copy.jobs and self._copies.pop(copy.number, None) is not None:
            # Reported now and not when it is gone, so that it gets no task meanwhile.
            self._apply(self._residents.note_ended(copy.number, Ending.DIED, time.monotonic()))

    def _ended(self, copy: Copy, outcome: ProcessOutcome) -> None:
        while copy.stdout_fd >= 0 and outcome.pid is not None and self._read(copy):
            pass  # an answer that came with the end counts
        copy.read_stderr()
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
        self._apply(self._residents.note_ended(copy.number, Ending.DIED if died else Ending.STOPPED, now))
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
            "a resident program ended before its first answer; the next start waits",
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
        except Exception as error:  # the caller's: it must not keep other tasks from being reported
            self._loop.call_exception_handler({"message": "the callback of a resident task raised", "exception": error})
