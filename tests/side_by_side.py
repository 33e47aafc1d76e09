"""Files of tests side by side: `pytest --workers 7`.

Most tests wait most of the time, for processes to start and to end: what waits waits together. One process collects
all tests; its forks take one file after the other from one queue, and tell it what happened. So the last of them end
at about the same time, whichever file takes longer than it did, and nothing is imported twice.

Invariants: all tests of a file run in one worker, in their order, and so do those of a folder in `TOGETHER`; tests
marked `alone` run last, one after the other; reports of a file are shown together, when it has ended; a worker ends
when it can no longer tell of its tests.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from tests import costs
from tests.costs import Cost, Moment, find_file

if TYPE_CHECKING:
    from tests.servers import Servers

#: What takes longest starts first, or the others would have to wait for it at the end.
LONGEST = (
    "services/triggerer/test_proof_host.py",  # in a new process: after many other files it hardly gets on
    "spark/test_backfill.py",
    "spark/bounded/test_dataframe.py",
    "cli/dags/test_dev.py",
    "docs/test_snippets.py",
    "sources/test_exactly_once.py",
    "spark/live/test_supervisor.py",
    "services/triggerer/test_task_triggers.py",
    "cli/dags/test_dev_postgres.py",
    "sources/test_kafka.py",
    "web/browser/test_dags.py",
    "cli/test_triggers_replicas.py",
    "deadletters/redrive/test_run.py",
    "cli/dags/test_commands.py",
    "store/test_postgres.py",
    "cli/test_dlq.py",
    "store/test_dag_life.py",
    "services/triggerer/test_sessions.py",
    "triggers/producers/test_sqs.py",
    "spark/test_pipeline.py",
    "cli/test_triggers_stop.py",
    "dags/test_operators.py",
    "spark/session/test_session.py",
    "cli/test_triggers_command.py",
    "sinks/test_file_sink.py",
    "sinks/test_postgres_sink.py",
    "cli/test_main.py",
    "spark/session/test_packaging.py",
    "sinks/test_kafka_sink.py",
    "services/worker/test_attempts.py",
    "recorder/test_reader.py",
    "services/triggerer/test_proof_replicas.py",
    "services/triggerer/test_host.py",
    "runtime/test_broker.py",
    "sources/test_transactional_producer.py",
    "triggers/producers/test_contract.py",
    "cli/test_run.py",
    "services/worker/test_process.py",
    "services/triggerer/test_host_endings.py",
    "sources/test_late_requests.py",
    "sinks/test_mongo_sink.py",
    "store/test_dag_isolation.py",
    "cli/test_send.py",
    "spark/test_start.py",
    "web/test_recorded.py",
    "deadletters/test_writer.py",
    "cli/test_trace.py",
    "spark/live/test_recorded_engines.py",
    "cli/test_consume.py",
    "services/triggerer/test_task_host.py",
    "cli/test_dev.py",
    "services/triggerer/test_proof_kafka.py",
    "cli/test_help.py",
    "services/supervision/test_trials.py",
    "sinks/test_through_a_pipeline.py",
    "sinks/test_http_sink.py",
    "store/test_dag_random.py",
    "web/test_access.py",
    "cli/test_triggers_signals.py",
    "store/test_migrate.py",
    "cli/test_pause.py",
    "chaos/test_kill.py",
    "web/test_peers.py",
    "pipeline/test_engine.py",
    "triggers/producers/test_kafka.py",
    "chaos/test_stop.py",
)
#: Folders whose files share what only one process can have.
TOGETHER = ("web/browser",)
_INDEX = struct.Struct("H")
#: How long a worker may take to end its servers and processes when the run is broken off.
_END_SECONDS = 60.0

File = list[pytest.Item]


class SideBySide:
    """The plugin of the process that collects.

    Args:
        workers: How many files run at a time.
        servers: What they share.
    """

    def __init__(self, workers: int, servers: Servers | None) -> None:
        self._workers = workers
        self._servers = servers
        self._costs: list[Cost] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests."""
        if session.config.option.collectonly or session.testsfailed:
            return None
        if self._servers is not None:
            self._servers.wait()
        alone = [item for item in session.items if item.get_closest_marker("alone")]
        beside = [item for item in session.items if not item.get_closest_marker("alone")]
        with _interrupted_when_terminated():
            # Those that need the machine for themselves come last, when nothing is left that runs beside all tests.
            for items, workers in ((beside, self._workers), (alone, 1)):
                if items and not session.shouldstop and not session.shouldfail:
                    _Run(session, sort_files(items), workers, self._costs).run()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what costs most."""
        costs.show(terminalreporter, self._costs)

    def pytest_unconfigure(self) -> None:
        """End the servers that all share."""
        if self._servers is not None:
            self._servers.close()


def sort_files(items: Sequence[pytest.Item]) -> list[File]:
    """Return the tests of each file, those first that take longest."""
    files = [list(tests) for _, tests in groupby(items, key=_find_unit)]
    order = {name: number for number, name in enumerate(LONGEST)}
    return sorted(files, key=lambda tests: order.get(find_file(tests[0]), len(order)))


def _find_unit(item: pytest.Item) -> str:
    """Return what runs in one worker: a file, or a folder."""
    file = find_file(item)
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


class _Run:
    """Runs files in workers.

    Args:
        session: Pytest's.
        files: What runs.
        workers: How many files run at a time.
        costs: Where to note what they cost.
    """

    def __init__(self, session: pytest.Session, files: list[File], workers: int, costs: list[Cost]) -> None:
        self._session = session
        self._costs = costs
        self._files = files
        self._count = workers
        # All numbers of files are in the pipe before somebody reads: whoever is free takes the next.
        self._queue, filled = os.pipe()
        os.write(filled, b"".join(_INDEX.pack(number) for number in range(len(files))))
        os.close(filled)
        self._pids: dict[Connection, int] = {}
        self._runs: dict[Connection, str] = {}

    def run(self) -> None:
        """Run all files and hand on what happens."""
        try:
            for _ in range(self._count):
                self._start()
            while self._pids:
                for connection in wait(list(self._pids)):
                    assert isinstance(connection, Connection)
                    self._receive(connection)
                if self._session.shouldstop or self._session.shouldfail:
                    self._empty_queue()
        except BaseException:
            self._break_off()
            raise
        finally:
            os.close(self._queue)

    def _start(self) -> None:
        ours, theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            for connection in (ours, *self._pids):
                connection.close()
            _work(self._session, self._files, self._queue, theirs)
        theirs.close()
        self._pids[ours] = pid

    def _receive(self, connection: Connection) -> None:
        config = self._session.config
        try:
            told = connection.recv()
        except (EOFError, OSError):
            connection.close()
            status = os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(connection), 0)[1])
            if status:
                self._note_crash(self._runs.pop(connection, "a worker"), status)
            return
        if isinstance(told, str):
            self._runs[connection] = told
            return
        if isinstance(told, Cost):
            self._costs.append(told)
            return
        for name, location, reports in told:
            config.hook.pytest_runtest_logstart(nodeid=name, location=location)
            for data in reports:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
            config.hook.pytest_runtest_logfinish(nodeid=name, location=location)

    def _note_crash(self, name: str, status: int) -> None:
        """Let the test fail during which a worker ended; another worker takes the next file."""
        text = f"the process of this test ended with {status}; the other tests of its file did not run"
        path = name.partition("::")[0]
        report = pytest.TestReport(name, (path, None, name), {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._start()

    def _empty_queue(self) -> None:
        while os.read(self._queue, 4096):
            pass

    def _break_off(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                # A shell starts what runs behind it with SIGINT ignored; this is an interrupt in any case.
                os.kill(pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda number, frame: self._kill())
        signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)
        for connection, pid in self._pids.items():
            connection.close()
            os.waitpid(pid, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _kill(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _work(session: pytest.Session, files: list[File], queue: int, told: Connection) -> NoReturn:
    """Run files until there are no more; in a fork, which ends with that."""
    status = 1
    try:
        _use_own_streams(session.config)
        worker = _Worker(session, told)
        session.config.pluginmanager.register(worker)
        worker.run(_take_files(files, queue))
        status = 0
    except KeyboardInterrupt:
        status = 0  # the process that collected knows, and says so
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one would leave servers behind
            signal.signal(number, signal.SIG_IGN)
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
        told.close()
        os._exit(status)


def _take_files(files: list[File], queue: int) -> Iterator[File]:
    while number := os.read(queue, _INDEX.size):
        yield files[_INDEX.unpack(number)[0]]


def _use_own_streams(config: pytest.Config) -> None:
    """Capture into files of this process, and print nothing: whoever collected prints."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


class _Worker:
    """Runs the tests of files in a fork, and tells of them."""

    def __init__(self, session: pytest.Session, told: Connection) -> None:
        self._session = session
        self._told = told
        self._done: list[tuple[str, Any, list[dict[str, Any]]]] = []

    def run(self, files: Iterator[File]) -> None:
        """Run files one after the other; what is for the whole session ends after the last."""
        session = self._session
        # Tests of reloads forget modules; another import of one would not be the one that fixtures and tests have.
        modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tests"}
        for tests in files:
            before = Moment.now()
            for item, following in zip(tests, (*tests[1:], session), strict=True):
                self._told.send(item.nodeid)
                self._done.append((item.nodeid, item.location, []))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldstop or session.shouldfail:
                    break
            after = Moment.now()
            self._told.send(self._done)
            self._told.send(Cost(find_file(tests[0]), after.cpu_seconds - before.cpu_seconds, after.at - before.at))
            self._done = []
            sys.modules.update(modules)
            if session.shouldstop or session.shouldfail:
                break
        session._setupstate.teardown_exact(None)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report until the file has ended."""
        config = self._session.config
        self._done[-1][2].append(config.hook.pytest_report_to_serializable(config=config, report=report))


@contextmanager
def _interrupted_when_terminated() -> Iterator[None]:
    """End at SIGTERM as at Ctrl-C, with all that tests have started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
