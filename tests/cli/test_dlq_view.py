"""How dead letters look where there is little room, and where nobody looks."""

from __future__ import annotations

import io

import msgspec
import pyte
import pytest
from rich.console import Console
from rich.status import Status

from tidemill.cli.dlq.dlq import _print_table
from tidemill.cli.dlq.redrive import ShownProgress
from tidemill.cli.dlq.view import build_table, describe_letter
from tidemill.deadletters.letter import Letter, LetterKind, describe_sources
from tidemill.deadletters.reader import FoundLetter
from tidemill.deadletters.redrive.history import Redriven
from tidemill.runtime.kafka.source_message import SourceMessage

WHY = 'insert orders (id=17): UndefinedColumnError: column "totl" of relation "orders" does not exist'
LETTER = Letter(
    kind=LetterKind.TOMBSTONE,
    error=WHY,
    sink_type="postgres",
    sink_name="the-database-of-all-orders",
    sources=describe_sources([SourceMessage("orders", 3, 1_234_567, b"customer-17", b"v")]),
)
FOUND = FoundLetter(0, 1, LETTER, "")


def test_a_narrow_terminal_shows_ids_kinds_and_whole_errors() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(build_table([(FOUND, [])], console.width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in lines)
    first = lines[1].split()
    assert first[0] == LETTER.letter_id[:12]
    assert " ".join(first[1:3]) == LETTER.timestamp[:19].replace("T", " ")
    assert first[3] == "tombstone"
    begin = lines[0].index("ERROR")
    assert "".join(line[begin:].strip() for line in lines[1:]).replace(" ", "") == WHY.replace(" ", "")


def test_the_commands_that_a_letter_proposes_name_the_configuration_that_was_named() -> None:
    command = f"tidemill dlq redrive 'my orders.yaml' --id {LETTER.letter_id}"
    assert describe_letter(FOUND, "my orders.yaml").splitlines()[-1] == f"process again:  {command}"
    assert f"redrive --id {LETTER.letter_id}" in describe_letter(FOUND)


def test_a_letter_that_was_sent_again_says_so_and_proposes_what_works() -> None:
    often = FoundLetter(0, 1, msgspec.structs.replace(LETTER, redrives=3), "")
    sent = [Redriven(1_700_000_000, "source")]
    lines = describe_letter(often, sent=sent, max_redrives=3).splitlines()
    assert "redriven    2023-11-14 22:13:20 UTC to source" in lines
    assert lines[-1].endswith(f"redrive --id {LETTER.letter_id} --restart --max-redrives 4")
    console = Console(file=io.StringIO(), width=80)
    console.print(build_table([(often, sent), (FOUND, [])], console.width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "REDRIVEN" in text
    assert "11-14" in text


def test_what_goes_to_a_file_or_a_program_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    sent = [Redriven(1_700_000_000, "source"), Redriven(1_700_000_100, "other")]
    _print_table(iter([FOUND]), lambda page, width: build_table([(each, sent) for each in page], width))
    (_, line) = capsys.readouterr().out.splitlines()
    for part in (
        WHY,
        "postgres.the-database-of-all-orders",
        "orders/3/1234567",
        "customer-17",
        "11-14 22:15 to other (2 times)",
    ):
        assert part in line


def test_a_line_that_a_redrive_prints_does_not_continue_its_status_line() -> None:
    terminal = io.StringIO()
    progress = ShownProgress(Status("connecting", console=Console(file=terminal, force_terminal=True, width=60)))
    progress.clear()
    terminal.write("first\n")
    progress.say("1 of 2 records")
    progress.clear()
    terminal.write("second\n")
    screen = pyte.Screen(60, 5)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display] == ["first", "second", "", "", ""]
