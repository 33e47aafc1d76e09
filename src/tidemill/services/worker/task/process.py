"""A task process: imports one DAG file, and runs attempts of it one after another, on orders of the worker.

The zygote forks it, and it communicates only with the worker. `dags.execution.running.run_attempt` handles everything
that concerns the user's operator; this module handles the connection, the output, interruptions, and what an attempt
leaves behind.

Invariants:

- Each `AttemptOrder` is answered by one `AttemptFinished`, unless the process ends.
- A process forked by the user's code never sends messages on behalf of this one.
- An interruption is raised in the user's code, or while that waits for an answer; never in the middle of a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import msgspec

from tidemill.core.errors import InvariantError, TidemillError, describe_error
from tidemill.core.tasks.endings import AttemptEnding, Deferral, Failure
from tidemill.dags.attempt.current import note_interrupted
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.exceptions import TaskTimeout
from tidemill.dags.execution.running import run_attempt
from tidemill.dags.file_errors import explain_file_error
from tidemill.dags.loading import LoadedFile, digest_file, load_file
from tidemill.dags.opened_files import sign_file
from tidemill.runtime.framing import FrameSplitter
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.worker.attempt_signals import END_SIGNAL, TIMEOUT_SIGNAL
from tidemill.services.worker.messages import (
    MAX_MESSAGE_BYTES,
    AskStore,
    AttemptFinished,
    AttemptOrder,
    FileLoaded,
    ForkedTask,
    Leave,
    Order,
    PlaceAwaited,
    PlaceGiven,
    StoreAnswered,
    StoreNotAnswered,
    Word,
    decode_answer,
    decode_order,
    frame,
)
from tidemill.services.worker.signatures import UNCERTAIN
from tidemill.services.worker.task.kill_watch import start_kill_watch
from tidemill.services.worker.task.output import Lines, TaskOutput
from tidemill.services.worker.task.residue import end_children, find_changes, take_state
from tidemill.services.worker.task.services import StoreServices
from tidemill.store.calls.call import Call
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES
from tidemill.store.calls.worker_calls import ClaimedAttempt

log = logging.getLogger(__name__)

A = TypeVar("A")

_CHUNK_BYTES = 262_144
#: How often a thread that waits for an answer checks whether the attempt was interrupted.
_LOOK_MILLISECONDS = 100


class TaskEnded(TaskTimeout):
    """Raised in a task that is ended from outside: it was cleared, marked or cancelled, or its worker is stopping."""


class WorkerGoneError(Exception):
    """The worker has exited; results are no longer needed."""


class ReadFile(NamedTuple):
    """An imported DAG file, and the message about it to the worker."""

    loaded: LoadedFile
    told: FileLoaded


def read_file(folder: Path, file: str) -> ReadFile:
    """Import a DAG file.

    Raises:
        Exception: The error of the file; also `SystemExit`.
    """
    at, cpu = time.monotonic(), time.process_time()
    files = {file: sign_file(folder / file)}
    loaded = load_file(folder / file, folder)
    for name, digest in loaded.modules.items():
        sign = sign_file(folder / name)
        # A file saved during its import may differ from what was read.
        files.setdefault(name, sign if digest_file(folder / name) == digest else UNCERTAIN)
    return ReadFile(loaded, FileLoaded({**loaded.opened, **files}, at, time.process_time() - cpu))


class TaskProcess:
    """A task process.

    Args:
        task: The request with which it was forked.
        worker: The socket to the worker.
        output: Captures what is printed and logged.
        read: The file, if it is already imported.
    """

    def __init__(
        self, task: ForkedTask, worker: socket.socket, output: TaskOutput, read: ReadFile | None = None
    ) -> None:
        self._read = read
        self._task = task
        self._worker = worker
        self._output = output
        self._frames = FrameSplitter(MAX_MESSAGE_BYTES)
        self._received: list[bytes] = []
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._number = 0
        #: The number of the last wait at a `yield` that is over.
        self._given = 0
        self._loaded: LoadedFile | None = None
        self._broken: BaseException | None = None
        #: The exception to raise; `_armed` tells whether it may be raised anywhere.
        self._interruption: TaskTimeout | None = None
        self._armed = False

    def run(self) -> int:
        """Execute the worker's orders until it sends `Leave` or exits."""
        signal.signal(TIMEOUT_SIGNAL, self._interrupt)
        signal.signal(END_SIGNAL, self._interrupt)
        start_kill_watch(self._output.flush)
        self._output.attach()
        try:
            self._load()
            while True:
                match decode_order(self._receive()):
                    case AttemptOrder(attempt, reuses, clock):
                        STORE_CLOCK.reading = clock
                        self._tell(self._run(attempt, reuses))
                    case Leave():
                        return 0
        except WorkerGoneError:
            return 0

    # -- the file --------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Import the file. If that fails, the process fails the attempt that it is given."""
        if self._read is None:
            self._read = self._import()
        if self._read is not None:
            self._loaded = self._read.loaded
        self._output.flush()
        self._tell(FileLoaded({}, 0.0, broken=True) if self._read is None else self._read.told)

    def _import(self) -> ReadFile | None:
        try:
            with self._interruptible():
                return read_file(Path(self._task.folder), self._task.file)
        except BaseException as error:  # whatever the file raises, including `SystemExit`
            self._broken = error
            return None

    def _explain_import(self, error: BaseException) -> AttemptEnding:
        """Log the import error in the log of the current attempt, and return the attempt's failure."""
        if isinstance(error, FileNotFoundError) and not (Path(self._task.folder) / self._task.file).exists():
            return Failure(f"the DAG file {self._task.file} no longer exists")
        log.error("%s cannot be imported", self._task.file, exc_info=error)
        return Failure(f"{self._task.file} cannot be imported: {explain_file_error(error)}")

    # -- an attempt ------------------------------------------------------------------------------------------------

    def _run(self, attempt: ClaimedAttempt, reuses: bool) -> AttemptFinished:
        if self._broken is not None:
            failure = self._explain_import(self._broken)
            self._output.flush()
            return AttemptFinished(failure, changed=("its file cannot be imported",))
        before = take_state() if reuses else None
        self._output.attach()
        if differs := self._differs(attempt):
            log.warning(
                "%s on this host differs from the file from which the DAG was stored; running the file of this host",
                attempt.file,
            )
        finished = self._make_attempt(attempt)
        if os.getpid() != self._pid:
            os._exit(1)  # a child that the user's code forked has returned here
        changed = () if before is None else find_changes(before)
        if ended := end_children():
            changed = (*changed, "processes were left")
            log.warning("the task left %s; tidemill ends them. Wait for them, or end them, before it returns", ended)
        self._output.flush()
        if finished.result is None or isinstance(finished.result, Failure):
            changed = (*changed, "the attempt failed")
        return msgspec.structs.replace(finished, changed=changed, differs=differs)

    def _differs(self, attempt: ClaimedAttempt) -> bool:
        """Return whether the imported file, or an import of it, differs from what the parser has stored."""
        return bool(attempt.digest) and self._loaded is not None and self._loaded.digest != attempt.digest

    def _make_attempt(self, attempt: ClaimedAttempt) -> AttemptFinished:
        assert self._loaded is not None  # for mypy: otherwise `_broken` is set
        dag = self._loaded.dags.get(attempt.dag_id)
        if dag is None:
            return AttemptFinished(Failure(f"{attempt.file} no longer defines a DAG {attempt.dag_id!r}"))
        try:
            with self._interruptible():
                result = run_attempt(dag, attempt, StoreServices(attempt, self))
        except KeyboardInterrupt:
            return AttemptFinished(
                Failure("a SIGINT, which tidemill did not send, interrupted the task (KeyboardInterrupt)")
            )
        except TaskTimeout as error:  # raised just before or after the attempt
            result = AttemptResult(Failure(describe_error(error)))
        if isinstance(self._interruption, TaskEnded):
            return AttemptFinished(None)
        for what, value in (
            *_list_stored(result.ending),
            *((f"the XCom {key!r} has", value) for key, value in result.xcoms),
        ):
            if (size := len(value.encode("utf-8", "replace"))) > MAX_XCOM_BYTES:
                text = f"{what} {size:,} bytes; at most {MAX_XCOM_BYTES:,} are stored; store a reference"
                return AttemptFinished(Failure(text, may_retry=False))
        return AttemptFinished(result.ending, result.xcoms, result.skip, result.skip_all_downstream, result.label)

    # -- interruptions ---------------------------------------------------------------------------------------------

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        if number == TIMEOUT_SIGNAL:
            self._interruption = TaskTimeout("the attempt exceeded its time limit (execution_timeout)")
        else:
            self._interruption = TaskEnded("the attempt was ended: its task has moved on, or its worker is stopping")
        note_interrupted()
        if self._armed:
            self._armed = False
            raise self._interruption

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        try:
            self._armed = True
            if self._interruption is not None:
                raise self._interruption
            yield
        finally:
            self._armed = False

    # -- the worker ------------------------------------------------------------------------------------------------

    def ask(self, call: Call[A]) -> A:
        """Return the store's answer to a call; any thread of the attempt may call this. Waits out an outage.

        Raises:
            TidemillError: The store refuses the call, for example because the attempt has been replaced.
            InvariantError: The call failed because of a fault in tidemill.
            TaskTimeout: The attempt was interrupted meanwhile.
        """
        if os.getpid() != self._pid:
            raise TidemillError("a process forked by the task cannot use the store; use it in the task itself")
        is_main = threading.current_thread() is threading.main_thread()
        armed = self._armed
        if is_main:
            # An interruption in the middle of a message would break the connection; the wait below checks for it.
            self._armed = False
        try:
            with self._lock:
                self._number += 1
                self._tell(AskStore(self._number, call))  # type: ignore[arg-type]
                answer = self._wait_for_answer(self._number, is_main and armed)
        finally:
            if is_main:
                self._armed = armed and self._interruption is None
        if isinstance(answer, StoreNotAnswered):
            raise TidemillError(answer.error) if answer.refused else InvariantError(answer.error)
        found: A = decode_answer(call, answer.value)
        return found

    def wait_for_place(self, is_over: Callable[[], bool]) -> None:
        """Wait until the worker lets the attempt go on; a thread other than the main one calls this.

        Meanwhile other threads may call the store: the connection is locked only for the moment of reading.
        """
        waiting = select.poll()
        waiting.register(self._worker, select.POLLIN)
        with self._lock:
            self._number += 1
            number = self._number
            self._tell(PlaceAwaited(number))
        while self._given < number and not is_over():
            if waiting.poll(_LOOK_MILLISECONDS):
                with self._lock:
                    # Another thread may have read it.
                    while self._given < number and (self._received or waiting.poll(0)):
                        self._take_order()

    def wait_for_elements(self, is_over: Callable[[], bool]) -> None:
        """Wait until the worker lets the attempt go on, because there are elements to run."""
        self.wait_for_place(is_over)

    def _take_order(self) -> Order:
        """Return the next order, and note the end of a wait at a `yield`."""
        order = decode_order(self._receive())
        if isinstance(order, PlaceGiven):
            self._given = max(self._given, order.number)
        return order

    def _wait_for_answer(self, number: int, interruptible: bool) -> StoreAnswered | StoreNotAnswered:
        waiting = select.poll()
        waiting.register(self._worker, select.POLLIN)
        while True:
            while not self._received and not waiting.poll(_LOOK_MILLISECONDS):
                if interruptible and self._interruption is not None:
                    raise self._interruption
            answer = self._take_order()
            # An interrupted caller may have left the answer to an earlier call unread.
            if isinstance(answer, StoreAnswered | StoreNotAnswered) and answer.number == number:
                if interruptible and self._interruption is not None:
                    raise self._interruption
                return answer

    def _receive(self) -> bytes:
        while not self._received:
            try:
                chunk = self._worker.recv(_CHUNK_BYTES)
            except OSError as error:
                raise WorkerGoneError from error
            if not chunk:
                raise WorkerGoneError
            self._received += self._frames.feed(chunk)
        return self._received.pop(0)

    def _tell(self, word: Word) -> None:
        try:
            self._worker.sendall(frame(word))
        except OSError as error:
            raise WorkerGoneError from error


def _list_stored(ending: AttemptEnding) -> tuple[tuple[str, str], ...]:
    """Return the values other than XComs that the end of an attempt stores, each with the beginning of an error
    message.
    """
    if not isinstance(ending, Deferral):
        return ()
    return (("the kwargs of the deferral have", ending.method_kwargs), ("the trigger's arguments have", ending.kwargs))


def main(request: bytes, fds: list[int], read: ReadFile | None = None) -> int:
    """Run a task process; the zygote or a template calls this in a fork.

    Args:
        request: An encoded `ForkedTask`.
        fds: The sockets of the worker and of the log, and the pipes of standard output and error.
        read: The file, if it is already imported.
    """
    worker, lines, stdout, stderr = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    task = msgspec.msgpack.decode(request, type=ForkedTask)
    output = TaskOutput(Lines(socket.socket(fileno=lines)), task.level)
    return TaskProcess(task, socket.socket(fileno=worker), output, read).run()
