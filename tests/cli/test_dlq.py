"""`tidemill dlq`, as a process: what people and programs see, and redrives that are stopped and killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.size import sized
from tests.until import slack
from typer.testing import CliRunner

from tidemill.cli.dlq.options import parse_target, parse_time
from tidemill.cli.dlq.view import plain
from tidemill.cli.main import app
from tidemill.core.deadletters.redrive import Target
from tidemill.core.errors import ConfigError
from tidemill.deadletters.letter import Letter, LetterKind, describe_sources, encode_letter
from tidemill.deadletters.payloads import encode_payload
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.sinks.payloads import KafkaPayload
from tidemill.testing.kafka import consume, produce, unique_name

pytestmark = pytest.mark.kafka

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MAIN = "from tidemill.cli.main import main; main()"


class Dlq:
    """A topic with letters, and the command over it."""

    def __init__(self, broker: EmbeddedBroker, tidemill: Run, folder: Path, partitions: int = 2) -> None:
        self.broker = broker
        self.bootstrap = broker.bootstrap
        self.topic = broker.create_topic(unique_name("orders"), partitions=partitions)
        self.dlq = broker.create_topic(f"{self.topic}_dlq")
        self.folder = folder
        self._tidemill = tidemill
        sasl = "client_config: {sasl.password: hunter2}"
        text = f"kafka: {{brokers: '{broker.bootstrap}', source_topic: {self.topic}, {sasl}}}\n"
        (folder / "tidemill.yaml").write_text(f"{text}sinks: {{kafka: {{out: {{topic: {self.topic}}}}}}}\n")

    def __call__(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command, *rest = arguments
        if command == "redrive":
            done = self._tidemill("dlq", command, *rest, env={"TIDEMILL_CONFIG": "tidemill.yaml"})
        else:
            # What only reads needs no process of its own, which takes a second.
            env = {"TIDEMILL_CONFIG": str(self.folder / "tidemill.yaml"), "COLUMNS": "200"}
            result = CliRunner().invoke(app, ["dlq", *map(str, arguments)], env=env)
            done = subprocess.CompletedProcess([], result.exit_code, result.stdout, result.stderr)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert "hunter2" not in done.stdout + done.stderr
        return done

    def json(self, *arguments: object, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json", code=code).stdout.splitlines()]

    def write(self, *letters: Letter | bytes) -> None:
        values = [each if isinstance(each, bytes) else encode_letter(each) for each in letters]
        produce(self.bootstrap, self.dlq, values)

    def message(self, offset: int, value: bytes | None = b"v", key: bytes | None = None) -> SourceMessage:
        return SourceMessage(self.topic, 0, offset, key, value, (), 1_700_000_000_000)

    def letter(self, offset: int, **fields: Any) -> Letter:
        sources = describe_sources([self.message(offset, b"value-%d" % offset, b"key-%d" % (offset % 3))])
        return Letter(**{"kind": LetterKind.TASK, "error": "exit code 1", "sources": sources, **fields})

    def sent(self, count: int) -> Counter[bytes]:
        return Counter(each.value() or b"" for each in consume(self.bootstrap, self.topic, count))

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "dlq", "redrive", "tidemill.yaml", *map(str, arguments)],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def dlq(embedded_kafka: EmbeddedBroker, tidemill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dlq:
    # Logs of this process are the test's own.
    monkeypatch.setattr("tidemill.runtime.log.setup.configure", lambda settings: None)
    return Dlq(embedded_kafka, tidemill, tmp_path)


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds")


def mixed(dlq: Dlq) -> list[Letter]:
    payload = encode_payload(KafkaPayload("out", "k", {"total": 12, "note": "[bold]x[/bold]"}))
    letters = [
        dlq.letter(
            0, timestamp=days_ago(3), stderr="line 1\nline \x1b[31m2\n", exit_code=3, task_id="t-0", args=["-v"]
        ),
        dlq.letter(1, timestamp=days_ago(2), kind=LetterKind.PARSE, error="no JSON at 7\nmore"),
        dlq.letter(
            2,
            timestamp=days_ago(1),
            kind=LetterKind.DELIVERY,
            error="broker said no",
            sink_name="out",
            sink_type="kafka",
            original_payloads=[payload],
            redrives=1,
        ),
    ]
    dlq.write(letters[0], b"\x00garbage", *letters[1:])
    return letters


def test_list_shows_the_newest_first_and_filters(dlq: Dlq) -> None:
    letters = mixed(dlq)
    ids = [each.letter_id for each in letters]

    listed = dlq("list").stdout
    assert re.findall(r"^\w{12}", listed, re.MULTILINE) == [each[:12] for each in reversed(ids)]
    assert "no JSON at 7" in listed
    assert "\nmore" not in listed
    assert f"{dlq.topic}/0/2" in listed
    assert "key-2" in listed
    assert "kafka.out" in listed
    assert "no letter" in listed

    def found(*filters: object) -> list[int]:
        return [ids.index(each["letter_id"]) for each in dlq.json("list", *filters)]

    assert found("--kind", "task", "--kind", "parse") == [1, 0]
    assert found("--sink", "out") == [2]
    assert found("--key", "key-1") == [1]
    assert found("--text", "JSON AT") == [1]
    assert found("--text", "value-2") == [2]
    assert found("--text", '"total":12') == found("--text", "total") == [2]
    assert found("--from", days_ago(2.5), "--until", days_ago(1.5)) == [1]
    assert found("--from", "36h") == [2]
    assert found("--id", ids[0][:20]) == [0]
    assert found("--kind", "task", "--limit", "0") == [0]
    assert len(dlq.json("list", "--limit", "2")) == 2
    assert {"dlq": dlq.json("list")[-1]["dlq"]} == {"dlq": {"partition": 0, "offset": 1}}


def test_show_has_everything_and_no_control_characters(dlq: Dlq) -> None:
    letters = mixed(dlq)
    text = dlq("show", letters[0].letter_id).stdout
    for part in (letters[0].letter_id, "exit code 1", "t-0", "-v", "line 1", "value-0", "key-0", "2023-11-14 22:13:20"):
        assert part in text
    assert f"{dlq.topic}/0/0" in text
    assert f"tidemill dlq redrive --id {letters[0].letter_id}" in text
    assert "\x1b" not in text
    assert "\\x1b[31m2" in text
    delivery = dlq("show", letters[2].letter_id[:10]).stdout
    for part in ("sinks.kafka.out", '"note":"[bold]x[/bold]"', "redrives    1", "--to sink"):
        assert part in delivery
    (as_json,) = dlq.json("show", letters[2].letter_id)
    assert as_json["original_payloads"] == letters[2].original_payloads
    assert "no letter 'ffffx'" in dlq("show", "ffffx", code=ExitCode.CONFIG).stderr


def test_show_asks_for_more_where_several_letters_begin_so(dlq: Dlq) -> None:
    dlq.write(dlq.letter(0, letter_id="abc1"), dlq.letter(1, letter_id="abc2"), dlq.letter(2, letter_id="abc"))
    assert "several ids begin with 'ab'" in dlq("show", "ab", code=ExitCode.CONFIG).stderr
    assert "abc2" in dlq("show", "abc2").stdout


def test_stats_count_by_kind_sink_error_and_day(dlq: Dlq) -> None:
    letters = mixed(dlq)
    dlq.write(dlq.letter(3, timestamp=letters[0].timestamp, error="exit code 1"))
    (counts,) = dlq.json("stats")
    assert (counts["letters"], counts["messages"], counts["no_letters"], counts["redriven_before"]) == (4, 4, 1, 1)
    assert counts["by_kind"] == {"task": 2, "delivery": 1, "parse": 1}
    assert counts["by_sink"] == {"kafka.out": 1}
    assert counts["by_error"] == {"exit code 1": 2, "broker said no": 1, "no JSON at 7": 1}
    assert counts["by_day"] == {each.timestamp[:10]: 1 + (each is letters[0]) for each in letters}
    assert (counts["oldest"], counts["newest"]) == (letters[0].timestamp, letters[2].timestamp)
    text = dlq("stats", "--kind", "task").stdout
    assert "2 dead letters, 2 messages" in text
    assert "by error\n         2  exit code 1" in text


def test_a_dry_run_says_what_would_go_where(dlq: Dlq) -> None:
    letters = mixed(dlq)
    done = dlq("redrive", "--dry-run")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [each.letter_id for each in letters]
    assert f"1 message to {dlq.topic}/0" in done.stdout
    assert "3 letters would be sent, 3 messages" in done.stderr
    assert "1 not sent: no letter" in done.stderr
    *lines, result = dlq.json("redrive", "--dry-run", "--to", "sink")
    assert [line["to"] for line in lines] == ["sinks.kafka.out"]
    assert (result["dry_run"], result["letters_sent"]) == (True, 1)


def test_redrive_continues_and_says_what_it_did(dlq: Dlq) -> None:
    dlq.write(*(dlq.letter(n) for n in range(5)), dlq.letter(5, redrives=3))
    (first,) = dlq.json("redrive", "--limit", "2")
    assert (first["ended"], first["letters_sent"], first["resumed"], first["records_left"]) == ("limit", 2, False, 4)
    second = dlq("redrive", code=ExitCode.REMOTE).stderr
    assert "3 letters sent, 3 messages (continued from where the last run ended)" in second
    assert "1 not sent: max_redrives" in second
    assert "already sent again 3 times" in second
    assert set(dlq.sent(5).values()) == {1}


def test_list_and_show_say_what_was_redriven_when_and_where_to(dlq: Dlq) -> None:
    letters = [*(dlq.letter(n) for n in range(4)), dlq.letter(4, redrives=3)]
    dlq.write(*letters)
    assert all(line["redriven"] == [] for line in dlq.json("list"))
    began = datetime.now(UTC).replace(microsecond=0)
    other = dlq.broker.create_topic(unique_name("elsewhere"))
    dlq("redrive", "--limit", "3")
    dlq("redrive", "--limit", "1", "--to", other)
    dlq("redrive", code=ExitCode.REMOTE)

    listed = {line["letter_id"]: line["redriven"] for line in dlq.json("list")}
    told = [[each["to"] for each in listed[letter.letter_id]] for letter in letters]
    assert [sorted(each) for each in told] == [sorted(["source", other]), ["source"], ["source"], ["source"], []]
    times = [datetime.fromisoformat(each["at"]) for sent in listed.values() for each in sent]
    assert all(began <= at <= datetime.now(UTC) for at in times)
    assert "REDRIVEN" in dlq("list").stdout
    assert f"UTC to {other}" in dlq("show", letters[0].letter_id).stdout
    assert "--max-redrives 4" in dlq("show", letters[4].letter_id).stdout
    assert "1 letter sent" in dlq("redrive", "--id", letters[4].letter_id, "--max-redrives", "4").stderr


def test_messages_that_a_letter_had_no_room_for_are_counted_and_named(dlq: Dlq) -> None:
    whole, part = dlq.letter(0), dlq.letter(1, sources_dropped=1_200)
    dlq.write(whole, part)
    dry = dlq("redrive", "--dry-run").stderr
    assert "1,200 messages cannot be redriven" in dry
    done = dlq("redrive", code=ExitCode.REMOTE)
    assert "2 letters sent, 2 messages" in done.stderr
    assert f"{part.letter_id}: sent, except 1,200 of its messages" in done.stderr
    (result,) = dlq.json("redrive", "--restart", code=ExitCode.REMOTE)
    assert (result["letters_sent"], result["messages_lost"]) == (2, 1_200)
    assert result["sent_in_part"] == [{"letter_id": part.letter_id, "messages_lost": 1_200}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "--kind", "tsk"], "unknown kind; choose one of parse, tombstone"),
        (["list", "--from", "yesterday"], "--from yesterday: not a valid time; write 2026-05-01T12:00 (UTC), or 2h"),
        (["redrive", "--from", "2h"], "a redrive needs an absolute time"),
        (["redrive", "--to", "no/topic"], "write source, sink or the name of a topic"),
        (["redrive", "--to", "nowhere"], "topic 'nowhere' does not exist"),
        (
            ["redrive", "--to", "sink", "--sink", "outt", "--sink", "kafka.out"],
            "--sink outt: no configured sink and no letter has this name; configured: kafka.out",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(dlq: Dlq, arguments: list[str], said: str) -> None:
    dlq.write(dlq.letter(0))
    done = dlq(*arguments, code=ExitCode.CONFIG)
    assert said in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["list", "stats", "redrive"])
def test_a_missing_topic_and_brokers_that_are_not_there_are_named(
    dlq: Dlq, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.runtime.kafka.client.CALL_SECONDS", 1.0)
    config = (dlq.folder / "tidemill.yaml").read_text()
    (dlq.folder / "tidemill.yaml").write_text(f"{config}dlq: {{topic: other}}\n")
    assert "topic 'other' does not exist" in dlq(command, code=ExitCode.CONFIG).stderr
    if command != "redrive":
        port = free_port()
        (dlq.folder / "tidemill.yaml").write_text(config.replace(dlq.bootstrap, f"127.0.0.1:{port}"))
        assert f"no answer from Kafka at 127.0.0.1:{port}" in dlq(command, code=ExitCode.REMOTE).stderr


def test_ctrl_c_ends_after_what_is_in_flight_and_the_same_command_continues(dlq: Dlq) -> None:
    dlq.write(*(dlq.letter(n) for n in range(60)))
    process = dlq.start("--rate", "30")
    try:
        dlq.sent(5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "records left; repeat the command to continue" in output
    left = int(re.findall(r"(\d+) records left", output)[0])
    assert 0 < left < 60
    dlq("redrive")
    assert dlq.sent(60) == Counter(b"value-%d" % n for n in range(60))


@pytest.mark.long  # tests/deadletters has it of a redrive
def test_a_redrive_that_is_killed_again_and_again_sends_each_letter_once(dlq: Dlq) -> None:
    count, kills = 2_000, 10
    dlq.write(*(dlq.letter(n) for n in range(count)))
    bits = random.Random(7)
    for _ in range(kills):
        process = dlq.start("--rate", str(count // 3))
        try:
            # Killed anywhere: while it starts, sends, or saves.
            process.wait(1.0 + bits.random())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=100)
    dlq("redrive")
    assert dlq.sent(count) == Counter(b"value-%d" % n for n in range(count))
    again = dlq.json("redrive")[0]
    assert (again["letters_sent"], again["records_left"]) == (0, 0)


def test_a_huge_topic_is_streamed(dlq: Dlq) -> None:
    count = sized(20_000, 50_000)
    body = "x" * 2_000
    produce(dlq.bootstrap, dlq.dlq, (encode_letter(dlq.letter(n, stderr=body)) for n in range(count)))
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "sys.argv = ['tidemill', 'dlq', 'stats', 'tidemill.yaml', '--json', *sys.argv[1:]]\n"
        "from tidemill.cli.main import main\n"
        "try: main()\n"
        # What the kernel says of a process depends on who started it; of its memory it does not.
        "except SystemExit:\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    print(int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) // 1024)\n"
    )

    def peak_mib(*filters: str) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", code, *filters], cwd=dlq.folder, capture_output=True, text=True, timeout=120
        )
        counts, peak = done.stdout.splitlines()
        return json.loads(counts)["letters"], int(peak)

    letters, peak = peak_mib()
    assert letters == count
    # 50 MB of letters (125 at full length); the client's own queue holds 16.
    assert peak < 160
    began = time.monotonic()
    assert len(dlq.json("list", "--limit", "5")) == 5
    assert time.monotonic() - began < slack(10)


# -- small parts ----------------------------------------------------------------------------------------------


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert parse_time("--from", None) is None
    assert parse_time("--from", "1970-01-02") == 86_400
    assert parse_time("--from", "1970-01-01T01:00+01:00") == 0
    assert parse_time("--from", "2h") == pytest.approx(time.time() - 7_200, abs=5)
    for text in ("", "2 parsecs", "2026-13-01", "١h"):
        with pytest.raises(ConfigError):
            parse_time("--from", text)


def test_a_topic_may_have_the_name_of_a_word() -> None:
    assert parse_target("source") == (Target.SOURCE, "")
    assert parse_target("sink") == (Target.SINK, "")
    assert parse_target("topic:sink") == (Target.TOPIC, "sink")
    assert parse_target("orders.v2") == (Target.TOPIC, "orders.v2")


def test_text_from_outside_is_harmless_on_a_terminal() -> None:
    assert plain("a\x1b]0;x\x07\nb\u202ec") == "a\\x1b]0;x\\x07\\x0ab\\x202ec"
    assert plain("a\n\tb", lines=True) == "a\n\tb"
