"""`tidemill dlq` over dead letters in files: what it says, and redrives that are killed; there is no broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests import prepared
from tests.jsonl import read_lines
from tests.letters import letter, write
from tests.until import wait_until
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.deadletters.payloads import encode_payload
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks.payloads import FilePayload

MAIN = "from tidemill.cli.main import main; main()"


class Dlq:
    """A folder with letters, and the command over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.letters = folder / "letters"
        (folder / "tidemill.yaml").write_text(
            f"kafka: {{brokers: '127.0.0.1:{free_port()}'}}\n"
            f"dlq: {{path: {self.letters}}}\n"
            f"sinks: {{filesystem: {{out: {{base_path: {folder / 'out'}}}}}}}\n"
        )

    def __call__(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        env = {"TIDEMILL_CONFIG": str(self.folder / "tidemill.yaml"), "COLUMNS": "200"}
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            result = CliRunner().invoke(app, ["dlq", *map(str, arguments)], env=env)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert result.exit_code == code, f"{result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        return subprocess.CompletedProcess([], result.exit_code, result.stdout, result.stderr)

    def json(self, *arguments: object, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json", code=code).stdout.splitlines()]

    def start(self) -> prepared.Forked:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        arguments = ["dlq", "redrive", "tidemill.yaml", "--to", "sink", "--rate", "400"]
        return prepared.start(arguments, cwd=self.folder, env=clean)

    def sent(self) -> Counter[int]:
        path = self.folder / "out" / "out.jsonl"
        return Counter(line["n"] for line in read_lines(path))


@pytest.fixture
def dlq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dlq:
    # Logs of this process are the test's own.
    monkeypatch.setattr("tidemill.runtime.log.setup.configure", lambda settings: None)
    return Dlq(tmp_path)


def delivery(number: int, **fields: Any) -> Letter:
    payload = encode_payload(FilePayload(path="out.jsonl", data={"n": number}))
    sink = {"kind": LetterKind.DELIVERY, "sink_type": "filesystem", "sink_name": "out"}
    return letter(number, **{**sink, "original_payloads": [payload], **fields})


def test_list_show_and_stats_read_the_files(dlq: Dlq) -> None:
    old = letter(1, timestamp="2026-01-01T00:00:00+00:00", error="printer on fire")
    new = [delivery(number, timestamp=f"2026-01-02T00:00:0{number}+00:00", error="no room") for number in (2, 3)]
    path = write(dlq.letters, [new[0]], [new[1]], run="r1")
    write(dlq.letters, [old], run="r2")
    listed = dlq.json("list")
    assert [each["letter_id"] for each in listed] == [each.letter_id for each in (new[1], new[0], old)]
    assert listed[0]["dlq"] == {"file": path.name, "row": 1}
    assert [each["letter_id"] for each in dlq.json("list", "--limit", 1)] == [new[1].letter_id]
    assert [each["letter_id"] for each in dlq.json("list", "--limit", 0)] == [
        each.letter_id for each in (old, new[0], new[1])
    ]
    assert [each["letter_id"] for each in dlq.json("list", "--text", "ON FIRE")] == [old.letter_id]
    assert [each["letter_id"] for each in dlq.json("list", "--from", "2026-01-02")] == [
        new[1].letter_id,
        new[0].letter_id,
    ]
    assert f"({path.name}, row 1)" in dlq("show", new[1].letter_id[:8]).stdout
    (stats,) = dlq.json("stats")
    assert (stats["letters"], stats["by_error"]) == (3, {"no room": 2, "printer on fire": 1})


def test_redrive_to_a_sink_goes_on_and_list_says_what_was_sent(dlq: Dlq) -> None:
    write(dlq.letters, [delivery(number) for number in range(10)])
    assert "4 letters sent, 4 payloads" in dlq("redrive", "--to", "sink", "--limit", 4).stderr
    (told,) = dlq.json("redrive", "--to", "sink")
    assert (told["letters_sent"], told["resumed"], told["records_left"]) == (6, True, 0)
    assert dlq.sent() == Counter(range(10))
    assert [[sent["to"] for sent in each["redriven"]] for each in dlq.json("list")] == [["sink"]] * 10
    assert "to sink" in dlq("list").stdout


def test_what_is_wrong_is_said_in_one_line(dlq: Dlq) -> None:
    assert f"the folder '{dlq.letters}' does not exist" in dlq("list", code=2).stderr
    write(dlq.letters, [letter(1)])
    (dlq.letters / "letters-damaged.parquet").write_bytes(b"PAR1")
    assert f"no letter 'nope' in folder '{dlq.letters}'" in dlq("show", "nope", code=2).stderr
    assert "letters-damaged.parquet is not a file of dead letters, or is damaged" in dlq("list").stdout
    assert "not dead letters: 1 record" in dlq("stats").stdout
    assert "1 not sent: no letter" in dlq("redrive", "--to", "sink", "--kind", "delivery").stderr


def test_a_redrive_that_is_killed_again_and_again_repeats_a_batch_at_most(dlq: Dlq) -> None:
    count = 600
    write(dlq.letters, *([delivery(number) for number in range(at, at + 60)] for at in range(0, count, 60)))
    kills = 0
    for _ in range(4):
        before = sum(dlq.sent().values())
        process = dlq.start()
        wait_until(
            lambda before=before, process=process: sum(dlq.sent().values()) > before + 30 or process.poll() is not None
        )
        if process.poll() is None:
            kills += 1
        process.kill()
        process.wait(60)
    while dlq.start().wait(60) != 0:
        pass
    sent = dlq.sent()
    assert set(sent) == set(range(count))
    assert kills > 0
    # A batch is 200 letters, or what half a second has at 400 a second.
    assert sum(sent.values()) - count <= 210 * kills
