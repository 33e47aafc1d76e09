"""The logs of attempts: what is kept, in which order, and what is masked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import pytest
from tests.services.worker.conftest import RunningWorker
from tests.services.worker.memory_store import make_attempt
from tests.services.worker.test_attempts import make, with_body
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.runtime.log.task_lines import TaskLine, WrittenLine, decode_lines
from tidemill.services.worker.logs.log_budget import LogBudget
from tidemill.services.worker.logs.logs import PART_BYTES, AttemptLog
from tidemill.store.calls.task_calls import ConnectionRecord
from tidemill.store.calls.worker_calls import PART_BASE, LogPart


def read(parts: list[LogPart]) -> list[TaskLine]:
    return [line for part in parts for line in decode_lines(zlib.decompress(part.data))]


def texts(parts: list[LogPart]) -> list[str]:
    return [line.text for line in read(parts)]


def make_log(max_bytes: int = 1_000_000, secrets: Sequence[str] = ()) -> AttemptLog:
    return AttemptLog(5, 2, 7, max_bytes, KnownSecrets(secrets))


def test_entries_and_output_are_in_the_order_of_their_times() -> None:
    log = make_log()
    log.add_output("stderr", b"two\n", 2)
    log.add(TaskLine(1, "info", "stdout", "one"))
    log.add(TaskLine(3, "error", "my.logger", "three\nlines"))
    (part,) = log.take(9)
    assert read([part]) == [
        TaskLine(1, "info", "stdout", "one"),
        TaskLine(2, "warning", "stderr", "two"),
        TaskLine(3, "error", "my.logger", "three\nlines"),
    ]
    assert (part.task, part.try_number, part.number, part.first_us, part.lines) == (5, 2, 7 * PART_BASE, 1, 3)
    assert not part.last
    assert not log.has_lines
    assert log.take(9) == []


def test_a_line_that_has_begun_is_shown_and_one_without_end_is_cut() -> None:
    log = make_log()
    log.add_output("stdout", b"caf\xc3", 1)
    log.add_output("stdout", b"\xa9\nwait", 1)
    assert log.has_lines
    assert texts(log.take(2)) == ["café", "wait"]
    log.add_output("stdout", b"x" * 50_000, 3)
    assert [len(text) for text in texts(log.finish(4))] == [16_384, 16_384, 16_384, 848]


def test_parts_are_small_and_numbered_and_the_last_one_says_so() -> None:
    log = make_log()
    for number in range(3000):
        log.add(TaskLine(number, "info", "stdout", f"line {number} " + "x" * 40))
    parts = log.finish(9)
    assert len(parts) > 2
    assert [part.number for part in parts] == [7 * PART_BASE + at for at in range(len(parts))]
    assert all(len(zlib.decompress(part.data)) <= PART_BYTES for part in parts)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(read(parts)) == 3000


@pytest.mark.parametrize("as_output", [False, True])
def test_beyond_the_limit_the_beginning_and_the_end_stay(as_output: bool) -> None:
    log = make_log(200_000)
    seen = []
    for number in range(20_000):
        if as_output:
            log.add_output("stdout", b"line %d\n" % number, number)
        else:
            log.add(TaskLine(number, "info", "stdout", f"line {number}"))
        if number % 1000 == 0:
            seen += log.take(number)
    lines = texts(seen + log.finish(20_000))
    assert lines[0] == "line 0"
    assert lines[-1] == "line 19999"
    notes = [line for line in lines if "logs.max_bytes_per_try" in line]
    assert "has written" in notes[0]
    assert "bytes are omitted here" in notes[1]
    assert 30_000 < sum(map(len, lines)) < 250_000


def test_what_tidemill_says_of_an_attempt_is_kept_beyond_the_limit() -> None:
    log = make_log(1000)
    log.add_output("stdout", b"x" * 10_000, 1)
    log.say("error", "the process was killed")
    assert texts(log.finish(2))[-1] == "the process was killed"


def test_secrets_are_masked_also_over_lines() -> None:
    log = make_log(secrets=["hunter2"])
    log.add(TaskLine(1, "info", "stdout", "password=abc\nand hunter2"))
    log.add(TaskLine(2, "info", "stdout", "plain"))
    for line in ("-----BEGIN PRIVATE KEY-----", "MIIEvQ", "-----END PRIVATE KEY-----"):
        log.add(TaskLine(3, "info", "stderr", line))
    found = texts(log.finish(4))
    assert found[:2] == ["password=***\nand ***", "plain"]
    assert not any("MIIEvQ" in text for text in found)


def put(log: AttemptLog, how: str, text: str) -> None:
    """Write a piece of a line: to the descriptor, or as `print` does."""
    if how == "descriptor":
        log.add_output("stdout", text.encode(), 1)
    else:
        log.add_written(WrittenLine(1, "info", "stdout", text.removesuffix("\n"), "9.stdout", text.endswith("\n")))


@pytest.mark.parametrize("how", ["descriptor", "print"])
def test_a_secret_that_is_written_in_two_pieces_is_masked_and_only_its_beginning_waits(how: str) -> None:
    log = make_log(secrets=["T0psecretpw"])
    put(log, how, "pw T0psec")
    assert texts(log.take(2)) == ["pw "]
    assert not log.has_lines
    assert log.take(3) == []
    put(log, how, "ret")
    assert log.take(4) == []
    put(log, how, "pw\n")
    put(log, how, "T0psec")
    assert texts(log.take(5)) == ["***"]
    assert texts(log.finish(6)) == ["T0psec"], "the end has come, and it is not the secret"


@pytest.mark.parametrize("how", ["descriptor", "print"])
@pytest.mark.parametrize("before", [16_384, 32_768, 65_536, 8_192])
def test_a_secret_that_lies_over_the_end_of_a_piece_of_a_long_line_is_masked(how: str, before: int) -> None:
    log = make_log(secrets=["T0psecretpw"])
    text = "x" * (before - 6) + "T0psecretpw" + "é" * 30_000
    for start in range(0, len(text), 16_384):
        put(log, how, text[start : start + 16_384])
    put(log, how, "\n")
    found = texts(log.finish(2))
    assert "".join(found) == text.replace("T0psecretpw", "***")
    assert max(map(len, found)) == 16_384


def test_a_long_line_that_was_shown_before_its_end_has_no_empty_line_after_it() -> None:
    log = make_log()
    log.add_output("stdout", b"x" * 20_000, 1)
    assert [len(text) for text in texts(log.take(2))] == [16_384, 3_616]
    log.add_output("stdout", b"\n\nnext\n", 3)
    assert texts(log.finish(4)) == ["", "next"], "one empty line was written"


def test_a_character_is_not_cut_where_the_output_was_read_in_two_pieces() -> None:
    log = make_log()
    data = ("x" + "ü" * 40_000).encode()
    for start in range(0, len(data), 8_192):
        log.add_output("stdout", data[start : start + 8_192], 1)
        if start == 16_384:
            early = texts(log.take(2))
    assert "".join(early + texts(log.finish(3))) == "x" + "ü" * 40_000


def test_a_secret_is_not_shown_where_the_middle_of_the_log_is_left_out() -> None:
    log = make_log(2_000, secrets=["T0psecretpw"])
    log.add_output("stdout", b"x" * 900 + b"T0psec", 1)
    log.add_output("stdout", b"retpw" + b"y" * 3_000 + b"T0pse", 2)
    log.add_output("stdout", b"cretpw" + b"z" * 800 + b"\n", 3)
    text = "\n".join(texts(log.finish(4)))
    assert "omitted here" in text
    assert "T0p" not in text
    assert "cretpw" not in text
    assert "***zzz" in text


def test_streams_that_have_begun_are_bounded_and_none_is_lost() -> None:
    log = make_log()
    for number in range(200):
        log.add_written(WrittenLine(number, "info", "stdout", f"begun {number}", f"{number}.stdout"))
    assert texts(log.finish(9)) == [f"begun {number}" for number in range(200)]


def test_an_entry_of_several_lines_that_is_too_long_is_cut_between_lines() -> None:
    log = make_log()
    line = "y" * 1_000
    log.add(TaskLine(1, "error", "my.logger", "\n".join([line] * 20)))
    found = texts(log.finish(2))
    assert [text.count("\n") + 1 for text in found] == [16, 4]
    assert set("\n".join(found).split("\n")) == {line}


async def test_everything_that_a_task_writes_is_in_its_log(worker: RunningWorker) -> None:
    await make(
        worker,
        """
print("one")
logging.getLogger("mine").warning("two %s", "2")
print("three", file=sys.stderr)
os.write(1, b"raw\\n")
subprocess.run(["sh", "-c", "echo from a program; echo its errors >&2"])
ctypes.CDLL(None).printf(b"from C\\n")
logging.getLogger("mine").info("%d", "not a number")
sys.stdout.buffer.write(b"bytes\\n")
print("no end", end="")
""",
    )
    await worker.report(1)
    await until(lambda: "no end" in worker.store.text_of(1), what="all is stored")
    lines = worker.store.read_log(1)
    found = {line.text: (line.level, line.source) for line in lines}
    assert found["two 2"] == ("warning", "mine")
    assert found["three"] == ("warning", "stderr")
    for text in ("one", "raw", "from a program", "from C", "bytes", "no end"):
        assert found[text] == ("info", "stdout"), text
    assert found["its errors"] == ("warning", "stderr")
    python = [line.text for line in lines if line.text in ("one", "two 2", "three")]
    assert python == ["one", "two 2", "three"]
    assert abs(lines[0].time_us / 1e6 - time.time()) < 60


async def test_lines_are_stored_while_the_task_runs(worker: RunningWorker) -> None:
    await make(worker, "print('begun')\nwhile not os.path.exists('%s'):\n    time.sleep(0.01)" % (worker.folder / "go"))
    await until(lambda: "begun" in worker.store.text_of(1), what="the first line is stored")
    assert not worker.store.reports
    (worker.folder / "go").touch()
    await worker.report(1)


async def test_a_task_that_writes_without_end_holds_up_nobody(start_worker) -> None:  # type: ignore[no-untyped-def]
    worker = await start_worker(max_log_bytes=200_000)
    worker.write(with_body("subprocess.run('yes | head -c 100000000', shell=True)"), "flood.py")
    worker.write(with_body("return 1"))
    worker.store.queue(make_attempt(1, "run", file="flood.py"), make_attempt(2, "run"))
    await worker.report(2)
    await worker.report(1)
    await until(lambda: "omitted here" in worker.store.text_of(1), what="the end of the log is stored")
    assert len(worker.store.text_of(1)) < 400_000


async def test_the_log_of_one_attempt_has_nothing_of_the_one_before(worker: RunningWorker) -> None:
    worker.write(with_body("print('try', ti.try_number)"))
    for number in (1, 2):
        worker.store.queue(make_attempt(number, "run", try_number=number))
        await worker.report(number)
    assert worker.store.text_of(1, 1) == "try 1"
    assert worker.store.text_of(2, 2) == "try 2"


async def test_passwords_of_connections_that_a_task_uses_are_masked(worker: RunningWorker) -> None:
    worker.store.connections["db"] = ConnectionRecord("db", "postgres", password="s3cr3t-word")
    worker.write("from tidemill.dags import Connection\n" + with_body("print('it is', Connection.get('db').password)"))
    worker.store.queue(make_attempt(1, "run"))
    await worker.report(1)
    assert worker.store.text_of(1) == "it is ***"


async def test_a_password_is_masked_however_a_task_writes_it(worker: RunningWorker) -> None:
    worker.store.connections["db"] = ConnectionRecord("db", "postgres", password="T0psecretpw")
    worker.write(
        with_body("""
p = Connection.get("db").password
for n in (16384, 32768, 8192, 4096):
    print("x" * (n - 6) + p)
    logging.getLogger("mine").warning("x" * (n - 6) + p)
    os.write(1, b"x" * (n - 6) + p.encode() + b"\\n")
print("\\rprogress " + p[:6], end="", flush=True)
print(p[6:])
""").replace("import ctypes", "from tidemill.dags import Connection\nimport ctypes")
    )
    worker.store.queue(make_attempt(1, "run"))
    await worker.report(1)
    await until(lambda: worker.store.text_of(1).count("***") == 13, what="all is stored")
    found = worker.store.text_of(1)
    assert "T0p" not in found
    assert "retpw" not in found
    assert "" not in found.split("\n")


async def test_a_password_that_a_module_keeps_is_masked_in_later_attempts_too(worker: RunningWorker) -> None:
    worker.store.connections["db"] = ConnectionRecord("db", "postgres", password="T0psecretpw")
    worker.write(
        with_body(
            "print('it is', cached())\nif ti.try_number == 3: raise OSError('cannot log in with ' + cached())"
        ).replace(
            "import ctypes",
            "import functools\nfrom tidemill.dags import Connection\n"
            "@functools.cache\ndef cached(): return Connection.get('db').password\nimport ctypes",
        )
    )
    for number in (1, 2, 3):
        worker.store.queue(make_attempt(number, "run", try_number=number))
        result = (await worker.report(number)).result
        await until(lambda number=number: worker.store.text_of(number, number), what="the log is stored")
        assert worker.store.text_of(number, number).startswith("it is ***")
        assert "T0p" not in worker.store.text_of(number, number)
    assert result.error == "OSError: cannot log in with ***"  # type: ignore[union-attr]


async def test_an_error_is_masked_before_it_is_cut(worker: RunningWorker) -> None:
    worker.store.variables["api_key"] = "T0psecretpw"
    await make(worker, "raise OSError('x' * 7980 + Variable.get('api_key') * 3)")
    error = await worker.error(1)
    assert len(error) < 8_010
    assert error.endswith(("x******...", "x*********"))
    assert "T0p" not in error


async def test_what_is_stored_for_other_tasks_is_not_masked(worker: RunningWorker) -> None:
    worker.store.variables["api_key"] = "T0psecretpw"
    await make(worker, "ti.xcom_push('key', Variable.get('api_key'))\nreturn {'url': Variable.get('api_key')}")
    report = await worker.report(1)
    assert report.xcoms == (("return_value", '{"url":"T0psecretpw"}'),)
    assert worker.store.xcoms == {"key": '"T0psecretpw"'}


def test_the_attempts_of_a_try_share_its_limit_and_each_may_write_a_little() -> None:
    budget = LogBudget(200_000)
    kept = []
    for epoch in range(6):
        log = budget.open_log(5, 1, epoch, KnownSecrets())
        log.add_output("stdout", b"x" * 60_000 + b"\n", 1)
        log.add(TaskLine(2, "info", "stdout", f"the end of {epoch}"))
        parts = log.finish(3)
        kept.append(sum(len(text) for text in texts(parts) if set(text) == {"x"}))
        assert f"the end of {epoch}" in texts(parts)
        budget.note_finished(log)

    assert kept == [60_000, 60_000, 0, 0, 0, 0], "only the end of what is too much for the rest is shown"
    assert budget.open_log(5, 2, 9, KnownSecrets())._half == 100_000, "another try begins anew"
