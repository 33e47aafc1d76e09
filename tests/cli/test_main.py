"""The command as a whole: its start, its help, its exit codes."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tidemill.cli import entry
from tidemill.cli.main import app
from tidemill.cli.reporting import reporting
from tidemill.core.errors import (
    ConfigError,
    FencedError,
    HandlerError,
    InvariantError,
    RemoteError,
    SinkNotConfiguredError,
)
from tidemill.runtime.files.lock import WorkerNameInUseError
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.stop_signals import EarlyStop
from tidemill.spark.foreground import note_signals

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['tidemill', '--help']\n"
        "from tidemill.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'pyspark', 'confluent_kafka', 'pyarrow', 'pydantic', 'yaml', 'structlog', 'asyncio', 'msgspec',\n"
        "         'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr


@pytest.mark.alone
def test_the_help_is_there_at_once() -> None:
    command = [sys.executable, "-m", "tidemill", "--help"]
    subprocess.run(command, check=True, capture_output=True)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)

    # 0.2 s on a quiet machine; the best of five is what the program itself takes on a busy one.
    assert min(times) < 0.8


def test_the_help_documents_commands_and_exit_codes(tidemill: Run) -> None:
    text = " ".join(tidemill("--help").stdout.split())

    for command in ("run", "demo", "init", "config", "doctor", "broker"):
        assert f" {command} " in text
    for code in ExitCode:
        assert f" {code.value} " in text
    assert "Exit codes" in tidemill("run", "--help").stdout


def test_the_version_is_shown(tidemill: Run) -> None:
    assert tidemill("--version").stdout.startswith("tidemill 0.")


def test_a_wrong_command_line_is_a_wrong_configuration(tidemill: Run) -> None:
    assert tidemill("nothing").returncode == ExitCode.CONFIG
    assert tidemill("run", "x.yaml").returncode == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (SinkNotConfiguredError("x"), 2),
        (WorkerNameInUseError("x"), 5),
        (FencedError("x"), 5),
        (HandlerError("x"), 3),
        (RemoteError("x"), 4),
        (InvariantError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert find_exit_code(error) == code


def test_our_own_errors_are_one_line_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, reporting():
        raise RemoteError("the broker is gone")

    assert caught.value.exit_code == ExitCode.REMOTE
    assert capsys.readouterr().err == "error: the broker is gone\n"


def test_other_errors_show_a_traceback_with_secrets_masked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, reporting():
        raise ValueError("bad: password=" + "hunter2")

    text = capsys.readouterr().err
    assert caught.value.exit_code == ExitCode.INTERNAL
    assert "Traceback" in text
    assert "ValueError: bad: password=***" in text


@pytest.mark.parametrize(("body", "code"), [("typer.echo('text')", 0), ("print('text'); raise typer.Exit(4)", 4)])
def test_a_reader_that_closes_the_pipe_ends_a_command_quietly(body: str, code: int) -> None:
    script = (
        "import sys, typer\n"
        "from tidemill.cli.reporting import reporting\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def show():\n"
        "    with reporting():\n"
        "        sys.stdin.read()\n"
        f"        {body}\n"
        "app()\n"
    )
    pipe = subprocess.PIPE
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=buffered, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == code


def test_a_pipe_that_breaks_elsewhere_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, reporting():
        raise BrokenPipeError

    assert caught.value.exit_code == ExitCode.INTERNAL
    assert "BrokenPipeError" in capsys.readouterr().err


def test_ctrl_c_before_anything_runs_is_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, reporting():
        raise KeyboardInterrupt

    assert caught.value.exit_code == ExitCode.STOPPED
    assert capsys.readouterr().err == ""


def test_a_wrong_configuration_is_refused_before_spark(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {source_topics: x, client_config: {sasl.password: hunter2}}")

    done = tidemill("run", "c.yaml", "--handler", "h:H")

    assert done.returncode == ExitCode.CONFIG
    assert "c.yaml:1: kafka.source_topics: unknown key; did you mean source_topic?" in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_handler_that_does_not_import_is_refused_before_spark(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")

    done = tidemill("run", "c.yaml", "--handler", "no_such_module:H")

    assert done.returncode == ExitCode.HANDLER
    assert "no module 'no_such_module' was found" in done.stderr
    assert "Traceback" not in done.stderr


def test_logs_of_a_command_that_does_not_configure_them_stay_out_of_its_output() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['tidemill', '--version']\n"
        "from tidemill.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'structlog' not in sys.modules\n"
        "from tidemill.runtime.kafka.client import LibraryLog, log\n"
        "LibraryLog().log(3, 'Broker transport failure')\n"
        "log.warning('a warning')\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert done.stdout.startswith("tidemill 0.")
    assert len(done.stdout.splitlines()) == 1
    assert "a warning" in done.stderr
    assert "transport failure" not in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("config", "schema")])
def test_an_output_that_cannot_be_written_is_not_a_bug(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )

    assert (done.returncode, done.stderr) == (
        ExitCode.REMOTE, "error: cannot write to a file or standard output: No space left on device\n",
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [("init",), ("triggers", "check"), ("triggers", "run"), ("demo", "--dir")])
def test_a_path_that_is_too_long_is_a_wrong_command_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    name = "x" * 300

    assert app([*arguments, name], standalone_mode=False) == ExitCode.CONFIG

    said = capsys.readouterr().err
    assert "File name too long" in said
    assert name in said
    assert "Traceback" not in said


def test_an_error_of_the_system_that_may_be_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, reporting():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "inside")

    assert caught.value.exit_code == ExitCode.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback() -> None:
    code = (
        "import os, signal, sys, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from tidemill.cli.entry import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("command", "code"),
    [("run", ExitCode.OK), ("dev", ExitCode.OK), ("backfill", ExitCode.STOPPED), ("status", -signal.SIGTERM)],
)
@pytest.mark.parametrize("module", ["typer", "tidemill.config.loading", "tidemill.config.settings"])
def test_sigterm_while_a_command_is_imported_is_a_start_that_is_stopped(command: str, code: int, module: str) -> None:
    script = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['tidemill', {command!r}, '--handler', 'x:Y', 'none.yaml']\n"
        f"sys.argv += ['--from', 'earliest', '--outcomes', 'x'] if {command!r} == 'backfill' else []\n"
        f"sys.argv[2:] = [] if {command!r} in ('dev', 'status') else sys.argv[2:]\n"
        "from tidemill.cli.entry import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("command", ["dev", "web", "triggers run none.yaml"])
def test_ctrl_c_and_a_closed_terminal_while_a_command_is_imported_stop_its_start(command: str, number: int) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'typer': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['tidemill', *{command.split()!r}]\n"
        "from tidemill.cli.entry import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    # A trigger host reloads its list at a hangup, and here it finds none.
    reloads = command.startswith("triggers") and number == signal.SIGHUP
    assert done.returncode == (ExitCode.CONFIG if reloads else ExitCode.OK), done.stderr


@pytest.mark.parametrize("module", ["tidemill.config.loading", "tidemill.services.dev.process"])
def test_ctrl_c_while_dev_is_imported_is_a_start_that_is_stopped(module: str) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['tidemill', 'dev']\n"
        "from tidemill.cli.entry import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.parametrize(("command", "code"), [("run", ExitCode.OK), ("backfill", ExitCode.STOPPED)])
def test_ctrl_c_in_what_an_import_calls_back_ends_a_start(tmp_path: Path, command: str, code: ExitCode) -> None:
    """An exception that is raised there is printed and forgotten."""
    script = (
        "import os, signal, sys, weakref\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'tidemill.cli.pipelines.handlers':\n"
        "            self.gone = weakref.ref(Finder(), lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['tidemill', {command!r}, 'c.yaml', '--handler', 'no_such_module:No']\n"
        + ("sys.argv += ['--from', 'earliest', '--outcomes', 'outcomes']\n" if command == "backfill" else "")
        + "from tidemill.cli.entry import main\n"
        "main()\n"
    )
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"kafka": {"source_topic": "t", "consumer_group": "g"}}))

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("number", "default"), [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)]
)
def test_an_early_stop_is_over_for_good_once_something_else_handles_the_signal(number: int, default: Any) -> None:
    before = signal.signal(number, EarlyStop(0))
    try:
        with note_signals(lambda: None):
            pass
        assert signal.getsignal(number) is default
    finally:
        signal.signal(number, before)


def test_a_terminal_that_sends_two_hangups_stops_once() -> None:
    noted: list[None] = []
    with note_signals(lambda: noted.append(None)):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert len(noted) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(noted) == 2


def test_ctrl_c_while_the_options_are_read_ends_the_command_without_a_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import typer.main\n"
        "typer.main.get_command = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['tidemill', 'status']\n"
        "from tidemill.cli.entry import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_ctrl_c_is_handled_as_before_once_the_command_runs(monkeypatch: pytest.MonkeyPatch, handler: Any) -> None:
    seen: list[Any] = []

    def run() -> None:
        with reporting():
            seen.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr("tidemill.cli.main.main", run)
    before = signal.signal(signal.SIGINT, handler)
    try:
        entry.main()
    finally:
        signal.signal(signal.SIGINT, before)

    assert seen == [handler]


def test_standard_streams_that_were_closed_are_the_null_device_also_for_programs_it_starts() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from tidemill.cli.main import open_closed_streams\n"
        "open_closed_streams()\n"
        "sys.stdin.buffer.read(); print(sys.stdout.isatty())\n"
        "subprocess.run(['cat'], check=True)\n"
        "sys.stderr.write(str([os.fstat(n).st_rdev == os.stat(os.devnull).st_rdev for n in (0, 1, 2)]))\n"
    )
    closed = f"exec <&- >&-; exec {sys.executable} -c {shlex.quote(code)}"

    done = subprocess.run(["sh", "-c", closed], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (0, "[True, True, False]")


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "a\nb"],
        ["trace", "t:0:\nerror: all is lost"],
        ["trace", "--label", "no\r\nvalue"],
        ["pause", "--for", "1\n2"],
        ["record", "merge", "nowhere\n\x1b[31m", "--to", "there"],
    ],
)
def test_what_a_user_typed_never_adds_a_line_to_an_error(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (line,) = done.stderr.strip("\n").split("\n")
    assert line.startswith("error: "), done.stderr
    assert "\x1b" not in line
