"""Runs tasks as subprocesses: start, feed, read, time out, kill and reap; `process` defines their outcome.

One epoll for all processes, registered once in the asyncio loop; per task three pipes, one posix_spawn and
one pidfd. No threads, no fork, no asyncio callback per descriptor: apart from the kernel's own work a task costs
about a dozen short system calls.

Invariants:
- `start` never raises for what is wrong with a task, and `done` is called exactly once per run, on the loop,
  never inside `start`; after `kill` it is not called at all.
- A process leads its own group. When it has ended, the rest of its group is killed while it is still a zombie
  (until then its id cannot belong to anyone else), then it is reaped.
- A run holds its pipes until both outputs ended, but after the end of its leader only `LINGER_SECONDS`
  longer: a grandchild that left the group cannot hold a slot.
- Output is complete or the task failed; nothing is cut silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from tidemill.config.executor_settings import ExecutorSettings
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.environment import Environment, TaskEnvironment
from tidemill.pipeline.tasks.pipes import Pipes
from tidemill.pipeline.tasks.process import (
    Done,
    ProcessOutcome,
    Run,
    check_limit,
    explain_start_failure,
    format_number,
    is_over,
    keep_descriptors,
    make_outcome,
    occupy_standard_fds,
    reap,
    signal_group,
)

__all__ = ["Executor", "ProcessOutcome", "Run"]

#: What becomes standard input, output and error of a process.
Fds = tuple[int, int, int]

#: How long the pipes of an ended process are read on while something outside its group still holds them.
LINGER_SECONDS = 0.25
#: How long `kill` waits for what got SIGKILL; only a process in uninterruptible sleep takes longer.
REAP_SECONDS = 5.0
#: How often processes are looked at that could not get a pidfd or a place in the epoll.
POLL_SECONDS = 0.01
#: How often descriptors are looked for that a process would inherit: the Kafka client's pipes, of which it has new ones
#: for every new broker. A look takes 0.05 ms.
DESCRIPTORS_SECONDS = 0.25

_DUP2 = os.POSIX_SPAWN_DUP2
#: All of them get their default action back: whatever an engine ignores, its tasks must not.
_SIGNALS = tuple(signal.valid_signals())


class Executor:
    """Runs tasks as processes of the running loop's thread.

    How many run at once, in which order, and what is tried again is the engine's business.

    Args:
        settings: Output caps, grace and environment.
        engine_id: Marks every process for the warden.
        environ: What the engine was started with.
    """

    def __init__(self, settings: ExecutorSettings, engine_id: str, environ: Mapping[str, str] = os.environ) -> None:
        """Filter the environment; open nothing yet."""
        self._environment = TaskEnvironment(environ, settings.env_inherit_deny, settings.env, engine_id)
        #: How many tasks may run at a time; the caller sees to that.
        self.capacity = settings.max_executors
        self._pipes = Pipes(settings.max_stdout_bytes, settings.max_stderr_bytes)
        self._grace_seconds = settings.term_grace_seconds
        self._runs: set[Run] = set()
        self._polled: set[Run] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._descriptors_at = -math.inf  # when they were looked for
        self._ended = asyncio.Event()  # one of the runs was finished; replaced by what waits again

    def open(self) -> None:
        """Join the running loop."""
        occupy_standard_fds()
        self._loop = asyncio.get_running_loop()
        self._pipes.open()
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop.add_reader(self._pipes.fileno(), self._on_events)

    @property
    def running(self) -> int:
        """How many runs were started and have not been reported."""
        return len(self._runs)

    def start(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_seconds: float, done: Done
    ) -> Run:
        """Start a process; how it ended is reported to `done`, later.

        Args:
            argv: The program (a path, or a name to find along PATH) and its arguments.
            stdin: All of its standard input.
            env: Added to the engine's filtered environment.
            timeout_seconds: Wall-clock limit; then SIGTERM to its group, the grace, SIGKILL.
            done: Called once, on the loop, unless the run is killed before.
        """
        run = Run(done, time.monotonic())
        self._runs.add(run)
        try:
            check_limit(timeout_seconds)
            self._spawn(run, argv, stdin, env)
        except Exception as error:  # whatever it is, it concerns this task alone
            self._refuse(run, argv, error)
            return run
        self._watch(run)
        self.limit(run, timeout_seconds, run.started_at)
        return run

    def attach(self, argv: Sequence[str], fds: Fds, done: Done) -> Run:
        """Start a process whose pipes are the caller's; here it is only watched, limited, killed and reaped.

        Args:
            argv: As for `start`.
            fds: What becomes its standard input, output and error; they stay open here.
            done: As for `start`; its outputs are empty.
        """
        run = Run(done, time.monotonic())
        self._runs.add(run)
        self._descriptors_at = -math.inf  # it would keep what it inherits for long
        try:
            self._launch(run, argv, self._environment.base, fds)
        except Exception as error:
            self._refuse(run, argv, error)
            return run
        self._watch(run)
        return run

    def limit(self, run: Run, timeout_seconds: float, now: float) -> None:
        """Give a run this many seconds from now on, whatever its limit was before; infinity: no limit."""
        run.timeout_seconds = timeout_seconds
        run.deadline = now + timeout_seconds
        if run.deadline < self._timer_at:
            self._arm(run.deadline, now)

    def describe_stall(self) -> str | None:
        """Return None: nothing holds up all of the tasks."""
        return None

    def _refuse(self, run: Run, argv: Sequence[str], error: Exception) -> None:
        self._pipes.close(run)
        run.failure = explain_start_failure(error)
        if run.failure[0] is ErrorKind.MISSING and argv:
            self._environment.forget(argv[0])
        self._loop.call_soon(self._finish, run)

    async def kill(self, runs: Iterable[Run], grace_seconds: float) -> None:
        """End these runs: SIGTERM to their groups, the grace, SIGKILL; their `done` is never called."""
        now = time.monotonic()
        mine = [run for run in runs if run in self._runs]
        for run in mine:
            run.done = None
            if run.pid is not None and not run.ended:
                run.failure = run.failure or (None, "killed")
                run.deadline = now + grace_seconds  # then the timer kills it, even if nothing waits here any longer
                self.send_signal(run, signal.SIGTERM)
        self._arm(now + grace_seconds, now)
        deadline = now + grace_seconds + REAP_SECONDS
        while any(run in self._runs for run in mine):
            if self._ended.is_set():
                self._ended = asyncio.Event()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ended.wait()
            except TimeoutError:
                return

    async def kill_all(self, grace_seconds: float) -> None:
        """End every run, as `kill` does."""
        await self.kill(list(self._runs), grace_seconds)

    def close(self) -> None:
        """Leave the loop; what still runs gets SIGKILL and is not reported."""
        for run in list(self._runs):
            run.done = None
            self.send_signal(run, signal.SIGKILL)
            self._pipes.close(run)
        deadline = time.monotonic() + REAP_SECONDS
        for run in self._runs:
            while run.pid is not None and not run.ended and not reap(run) and time.monotonic() < deadline:
                time.sleep(0.001)
        self._runs.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._pipes.fileno())
        self._pipes.close_all()
        os.close(self._null)

    def _spawn(self, run: Run, argv: Sequence[str], stdin: bytes, env: Mapping[str, str]) -> None:
        variables = self._environment.make_for_task(env) if env else self._environment.base
        theirs: list[int] = []
        try:
            reader = self._null
            if stdin:
                reader, run.stdin_fd = os.pipe2(os.O_CLOEXEC)
                theirs.append(reader)
                # Before the start: most children then find all of it, and its end.
                self._pipes.begin_feeding(run, stdin)
            run.stdout.fd, out = os.pipe2(os.O_CLOEXEC)
            theirs.append(out)
            run.stderr.fd, err = os.pipe2(os.O_CLOEXEC)
            theirs.append(err)
            os.set_blocking(run.stdout.fd, False)
            os.set_blocking(run.stderr.fd, False)
            self._launch(run, argv, variables, (reader, out, err))
        finally:
            for fd in theirs:
                os.close(fd)

    def _launch(self, run: Run, argv: Sequence[str], variables: Environment, fds: Fds) -> None:
        if run.started_at >= self._descriptors_at + DESCRIPTORS_SECONDS:
            self._descriptors_at = run.started_at
            keep_descriptors()
        run.pid = os.posix_spawn(
            self._environment.find(argv[0] if argv else "", variables),
            argv if isinstance(argv, (list, tuple)) else tuple(argv),
            variables,
            file_actions=((_DUP2, fds[0], 0), (_DUP2, fds[1], 1), (_DUP2, fds[2], 2)),
            setpgroup=0,
            setsigmask=(),
            setsigdef=_SIGNALS,
        )

    def _watch(self, run: Run) -> None:
        """Have its end and its outputs reported; without descriptors for that, poll it."""
        try:
            self._pipes.watch(run)
        except OSError:
            self._polled.add(run)
            now = time.monotonic()
            self._arm(now + POLL_SECONDS, now)

    def _on_events(self) -> None:
        pipes = self._pipes
        for fd, run in pipes.poll():
            try:
                if fd == run.pidfd:
                    self._on_exit(run)
                elif fd == run.stdout.fd:
                    pipes.read(run, run.stdout)
                elif fd == run.stderr.fd:
                    pipes.read(run, run.stderr)
                elif fd == run.stdin_fd:
                    pipes.feed(run)
                if run.ended and run.stdout.fd < 0 and run.stderr.fd < 0:
                    self._finish(run)
            except Exception as error:  # no memory, say: this run's end, but the other events stay
                self._break(run, error)

    def _on_exit(self, run: Run) -> None:
        with contextlib.suppress(OSError):  # the rest of its group, if there is any
            os.killpg(run.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it ran
        reap(run)
        now = time.monotonic()
        run.duration = now - run.started_at
        self._pipes.close_input(run)
        self._pipes.read_all(run)
        run.deadline = now + LINGER_SECONDS
        if (run.stdout.fd >= 0 or run.stderr.fd >= 0) and run.deadline < self._timer_at:
            self._arm(run.deadline, now)

    def _finish(self, run: Run) -> None:
        if run not in self._runs:
            return
        self._runs.remove(run)
        self._polled.discard(run)
        self._ended.set()
        done, run.done = run.done, None
        if done is None:
            return
        try:
            done(make_outcome(run))
        except Exception as error:  # the caller's: it must not keep other runs from being reported
            self._loop.call_exception_handler(
                {"message": f"the callback of process {run.pid} raised", "exception": error}
            )

    def _break(self, run: Run, error: Exception) -> None:
        run.failure = run.failure or (None, f"{type(error).__name__}: {error}")
        self.send_signal(run, signal.SIGKILL)
        now = time.monotonic()
        self._polled.add(run)  # its one exit event may be used up
        self._arm(now + POLL_SECONDS, now)

    def _arm(self, when: float, now: float) -> None:
        if when >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_later(when - now, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = math.inf
        now = time.monotonic()
        nearest = math.inf
        for run in list(self._runs):
            if run in self._polled:
                self._poll(run)
                nearest = now + POLL_SECONDS
            if run.deadline <= now:
                self._end_overdue(run, now)
            nearest = min(nearest, run.deadline)
        if nearest < math.inf:
            self._arm(nearest, now)

    def _end_overdue(self, run: Run, now: float) -> None:
        if run.ended:
            self._give_up_outputs(run)
        elif run.failure is None and self._grace_seconds > 0:
            run.failure = (ErrorKind.TIMEOUT, f"Timeout after {format_number(run.timeout_seconds)}s")
            self.send_signal(run, signal.SIGTERM)
            run.deadline = now + self._grace_seconds
        else:
            run.failure = run.failure or (
                ErrorKind.TIMEOUT,
                f"Timeout after {format_number(run.timeout_seconds)}s",
            )
            self.send_signal(run, signal.SIGKILL)
            run.deadline = math.inf

    def _give_up_outputs(self, run: Run) -> None:
        run.deadline = math.inf
        self._pipes.close_outputs(run)
        self._finish(run)

    def _poll(self, run: Run) -> None:
        try:
            if run.stdin_fd >= 0:
                self._pipes.feed(run)
            self._pipes.read_all(run)
            if not run.ended and is_over(run):
                self._on_exit(run)
            if run.ended and run.stdout.fd < 0 and run.stderr.fd < 0:
                self._finish(run)
        except Exception as error:
            self._break(run, error)

    def send_signal(self, run: Run, number: signal.Signals) -> None:
        """Send a signal to a run's group; its end is reported like any other."""
        signal_group(run, number)
