"""Runs tasks as subprocesses: start, feed, read, time out, kill and reap; `process` defines their outcome.

One epoll, registered once in the asyncio loop, serves all processes. A task takes three pipes, one posix_spawn and one
pidfd; there are no threads, no forks, and no asyncio callback per descriptor. Apart from the kernel's own work a task
costs about a dozen short system calls.

Invariants:
- `start` never raises for a fault of a task. `done` is called exactly once per process, on the loop, never inside
  `start`; after `kill` it is not called at all.
- A process leads its own group. When it has ended, the rest of its group is killed while the leader is still a zombie
  (until then its id cannot be reused), then the leader is reaped.
- A process keeps its pipes until both outputs have ended, but at most `LINGER_SECONDS` after the end of its leader: a
  grandchild that left the group cannot hold a slot.
- Output is complete, or the task failed; it is never cut silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.handler.models import ErrorKind
from tidemill.pipeline.tasks.environment import Environment, TaskEnvironment
from tidemill.pipeline.tasks.pipes import Pipes
from tidemill.pipeline.tasks.process import (
    Done,
    Process,
    ProcessOutcome,
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

__all__ = ["Executor", "Process", "ProcessOutcome"]

#: The descriptors that become a process's standard input, output and error.
Fds = tuple[int, int, int]

#: How long the pipes of an ended process are still read if a process outside its group holds them open.
LINGER_SECONDS = 0.25
#: How long `kill` waits after SIGKILL; only a process in uninterruptible sleep takes longer.
REAP_SECONDS = 5.0
#: The polling interval for processes without a pidfd or an epoll registration.
POLL_SECONDS = 0.01
#: The interval of checks for inheritable descriptors: the Kafka client opens pipes for every new broker. A check takes
#: 0.05 ms.
DESCRIPTORS_SECONDS = 0.25

_DUP2 = os.POSIX_SPAWN_DUP2
#: Every signal is reset to its default action: tasks must not ignore what the engine ignores.
_SIGNALS = tuple(signal.valid_signals())


class Executor:
    """Runs tasks as child processes on the running loop's thread.

    The engine decides how many tasks run at once, in which order, and which are retried.

    Args:
        settings: Output limits, grace period and environment.
        engine_id: Marks every process for the warden.
        environ: The engine's own environment.
    """

    def __init__(self, settings: ExecutorSettings, engine_id: str, environ: Mapping[str, str] = os.environ) -> None:
        self._environment = TaskEnvironment(environ, settings.env_inherit_deny, settings.env, engine_id)
        #: How many tasks may run at once; the caller enforces it.
        self.capacity = settings.max_executors
        self._pipes = Pipes(settings.max_stdout_bytes, settings.max_stderr_bytes)
        self._grace_seconds = settings.term_grace_seconds
        self._processes: set[Process] = set()
        self._polled: set[Process] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._descriptors_at = -math.inf  # when they were last checked
        self._ended = asyncio.Event()  # set when a process has ended; waiters replace it

    def open(self) -> None:
        """Attach the executor to the running loop."""
        occupy_standard_fds()
        self._loop = asyncio.get_running_loop()
        self._pipes.open()
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop.add_reader(self._pipes.fileno(), self._on_events)

    @property
    def running(self) -> int:
        """The number of processes that were started and have not been reported."""
        return len(self._processes)

    def start(
        self, argv: Sequence[str], stdin: bytes, env: Mapping[str, str], timeout_seconds: float, done: Done
    ) -> Process:
        """Start a process; its outcome is passed to `done` later.

        Args:
            argv: The program (a path, or a name to look up along PATH) and its arguments.
            stdin: The complete standard input.
            env: Variables added to the engine's filtered environment.
            timeout_seconds: Wall-clock limit; then SIGTERM to its group, the grace period, SIGKILL.
            done: Called once, on the loop, unless the process is killed before.
        """
        process = Process(done, time.monotonic())
        self._processes.add(process)
        try:
            check_limit(timeout_seconds)
            self._spawn(process, argv, stdin, env)
        except Exception as error:  # any error concerns this task alone
            self._refuse(process, argv, error)
            return process
        self._watch(process)
        self.limit(process, timeout_seconds, process.started_at)
        return process

    def attach(self, argv: Sequence[str], fds: Fds, done: Done) -> Process:
        """Start a process over the caller's pipes; the executor only watches, limits, kills and reaps it.

        Args:
            argv: As for `start`.
            fds: The descriptors for its standard input, output and error; the caller closes them.
            done: As for `start`; the outputs of the outcome are empty.
        """
        process = Process(done, time.monotonic())
        self._processes.add(process)
        # check now, because the process would keep inherited descriptors open for long
        self._descriptors_at = -math.inf
        try:
            self._launch(process, argv, self._environment.base, fds)
        except Exception as error:
            self._refuse(process, argv, error)
            return process
        self._watch(process)
        return process

    def limit(self, process: Process, timeout_seconds: float, now: float) -> None:
        """Set the time limit of a process to this many seconds from `now`; infinity: no limit."""
        process.timeout_seconds = timeout_seconds
        process.deadline = now + timeout_seconds
        if process.deadline < self._timer_at:
            self._arm(process.deadline, now)

    def describe_wait(self) -> str | None:
        """Return None: no cause stalls all tasks of this executor."""
        return None

    def _refuse(self, process: Process, argv: Sequence[str], error: Exception) -> None:
        self._pipes.close(process)
        process.failure = explain_start_failure(error)
        if process.failure[0] is ErrorKind.MISSING and argv:
            self._environment.forget(argv[0])
        self._loop.call_soon(self._finish, process)

    async def kill(self, processes: Iterable[Process], grace_seconds: float) -> None:
        """Kill these processes: SIGTERM to their groups, the grace period, SIGKILL; their `done` is never called."""
        now = time.monotonic()
        mine = [process for process in processes if process in self._processes]
        for process in mine:
            process.done = None
            if process.pid is not None and not process.ended:
                process.failure = process.failure or (None, "killed")
                process.deadline = (
                    now + grace_seconds
                )  # then the timer sends SIGKILL, even if this coroutine was cancelled
                self.send_signal(process, signal.SIGTERM)
        self._arm(now + grace_seconds, now)
        deadline = now + grace_seconds + REAP_SECONDS
        while any(process in self._processes for process in mine):
            if self._ended.is_set():
                self._ended = asyncio.Event()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ended.wait()
            except TimeoutError:
                return

    async def kill_all(self, grace_seconds: float) -> None:
        """Kill every process; see `kill`."""
        await self.kill(list(self._processes), grace_seconds)

    def close(self) -> None:
        """Detach from the loop; processes that still run get SIGKILL and are not reported."""
        for process in list(self._processes):
            process.done = None
            self.send_signal(process, signal.SIGKILL)
            self._pipes.close(process)
        deadline = time.monotonic() + REAP_SECONDS
        for process in self._processes:
            while process.pid is not None and not process.ended and not reap(process) and time.monotonic() < deadline:
                time.sleep(0.001)
        self._processes.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._pipes.fileno())
        self._pipes.close_all()
        os.close(self._null)

    def _spawn(self, process: Process, argv: Sequence[str], stdin: bytes, env: Mapping[str, str]) -> None:
        variables = self._environment.make_for_task(env) if env else self._environment.base
        theirs: list[int] = []
        try:
            reader = self._null
            if stdin:
                reader, process.stdin_fd = os.pipe2(os.O_CLOEXEC)
                theirs.append(reader)
                # Feed before the start: most children then find their whole input, and its end.
                self._pipes.begin_feeding(process, stdin)
            process.stdout.fd, out = os.pipe2(os.O_CLOEXEC)
            theirs.append(out)
            process.stderr.fd, err = os.pipe2(os.O_CLOEXEC)
            theirs.append(err)
            os.set_blocking(process.stdout.fd, False)
            os.set_blocking(process.stderr.fd, False)
            self._launch(process, argv, variables, (reader, out, err))
        finally:
            for fd in theirs:
                os.close(fd)

    def _launch(self, process: Process, argv: Sequence[str], variables: Environment, fds: Fds) -> None:
        if process.started_at >= self._descriptors_at + DESCRIPTORS_SECONDS:
            self._descriptors_at = process.started_at
            keep_descriptors()
        process.pid = os.posix_spawn(
            self._environment.find(argv[0] if argv else "", variables),
            argv if isinstance(argv, (list, tuple)) else tuple(argv),
            variables,
            file_actions=((_DUP2, fds[0], 0), (_DUP2, fds[1], 1), (_DUP2, fds[2], 2)),
            setpgroup=0,
            setsigmask=(),
            setsigdef=_SIGNALS,
        )

    def _watch(self, process: Process) -> None:
        """Watch a process's exit and its outputs; poll it if there are no descriptors left."""
        try:
            self._pipes.watch(process)
        except OSError:
            self._polled.add(process)
            now = time.monotonic()
            self._arm(now + POLL_SECONDS, now)

    def _on_events(self) -> None:
        pipes = self._pipes
        for fd, process in pipes.poll():
            try:
                if fd == process.pidfd:
                    self._on_exit(process)
                elif fd == process.stdout.fd:
                    pipes.read(process, process.stdout)
                elif fd == process.stderr.fd:
                    pipes.read(process, process.stderr)
                elif fd == process.stdin_fd:
                    pipes.feed(process)
                if process.ended and process.stdout.fd < 0 and process.stderr.fd < 0:
                    self._finish(process)
            except Exception as error:  # out of memory, for example: fail this run, but handle the other events
                self._break(process, error)

    def _on_exit(self, process: Process) -> None:
        with contextlib.suppress(OSError):  # the rest of its group, if any
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it ran
        reap(process)
        now = time.monotonic()
        process.duration = now - process.started_at
        self._pipes.close_input(process)
        self._pipes.read_all(process)
        process.deadline = now + LINGER_SECONDS
        if (process.stdout.fd >= 0 or process.stderr.fd >= 0) and process.deadline < self._timer_at:
            self._arm(process.deadline, now)

    def _finish(self, process: Process) -> None:
        if process not in self._processes:
            return
        self._processes.remove(process)
        self._polled.discard(process)
        self._ended.set()
        done, process.done = process.done, None
        if done is None:
            return
        try:
            done(make_outcome(process))
        except Exception as error:  # an error of the caller must not keep other processes from being reported
            self._loop.call_exception_handler(
                {"message": f"the done callback of process {process.pid} raised", "exception": error}
            )

    def _break(self, process: Process, error: Exception) -> None:
        process.failure = process.failure or (None, f"{type(error).__name__}: {error}")
        self.send_signal(process, signal.SIGKILL)
        now = time.monotonic()
        self._polled.add(process)  # its one-shot exit event may already be consumed
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
        for process in list(self._processes):
            if process in self._polled:
                self._poll(process)
                nearest = now + POLL_SECONDS
            if process.deadline <= now:
                self._end_overdue(process, now)
            nearest = min(nearest, process.deadline)
        if nearest < math.inf:
            self._arm(nearest, now)

    def _end_overdue(self, process: Process, now: float) -> None:
        if process.ended:
            self._give_up_outputs(process)
        elif process.failure is None and self._grace_seconds > 0:
            process.failure = (ErrorKind.TIMEOUT, f"Timeout after {format_number(process.timeout_seconds)}s")
            self.send_signal(process, signal.SIGTERM)
            process.deadline = now + self._grace_seconds
        else:
            process.failure = process.failure or (
                ErrorKind.TIMEOUT,
                f"Timeout after {format_number(process.timeout_seconds)}s",
            )
            self.send_signal(process, signal.SIGKILL)
            process.deadline = math.inf

    def _give_up_outputs(self, process: Process) -> None:
        process.deadline = math.inf
        self._pipes.close_outputs(process)
        self._finish(process)

    def _poll(self, process: Process) -> None:
        try:
            if process.stdin_fd >= 0:
                self._pipes.feed(process)
            self._pipes.read_all(process)
            if not process.ended and is_over(process):
                self._on_exit(process)
            if process.ended and process.stdout.fd < 0 and process.stderr.fd < 0:
                self._finish(process)
        except Exception as error:
            self._break(process, error)

    def send_signal(self, process: Process, number: signal.Signals) -> None:
        """Send a signal to a process's group; the end of the process is reported as usual."""
        signal_group(process, number)
