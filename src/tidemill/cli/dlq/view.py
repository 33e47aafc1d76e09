"""Formats dead letters: rows of a table, one letter with all its contents, counts; as text or JSON.

Invariant: control characters from users' and programs' data never reach a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.core.times import format_utc
from tidemill.core.wording import format_count
from tidemill.deadletters.letter import HISTORY_HEADER, LetterSource, read_history_header
from tidemill.deadletters.payloads import Blob
from tidemill.deadletters.reader import FoundLetter, show_bytes
from tidemill.deadletters.redrive.history import Redriven
from tidemill.deadletters.suggestions import suggest_commands

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tidemill.core.deadletters.letter_stats import LetterStats

#: In narrower terminals the table has fewer columns, and errors wrap; `show` has the rest.
_WIDE = 120
_NARROW_CELL = 22
#: The number of characters shown of values, payloads and headers; --json prints all.
_SHOWN = 2_000
_ID = 12


def plain(text: str, *, lines: bool = False) -> str:
    """Return a text with control characters escaped; with `lines`, line feeds and tabs stay."""
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else f"\\x{ord(char):02x}" for char in text)


def format_seconds(seconds: float) -> str:
    """Return a time in UTC for display."""
    return format_utc(seconds * 1_000_000)[:19]


def locate(source: LetterSource) -> str:
    """Return the position of a message."""
    return f"{source.topic}/{source.partition}/{source.offset}"


def encode_letter_line(found: FoundLetter, sent: Sequence[Redriven] = ()) -> str:
    """Return a letter as one line of JSON, with its position and its redrives."""
    where: dict[str, object] = {"partition": found.partition, "offset": found.offset}
    if found.file:
        where = {"file": found.file, "row": found.offset}
    if found.letter is None:
        return json.dumps({"dlq": where, "problem": found.problem})
    redriven = [{"at": _format_iso(each.at), "to": each.to} for each in sent]
    return msgspec.json.encode({"dlq": where, **msgspec.structs.asdict(found.letter), "redriven": redriven}).decode()


def build_table(found: Sequence[tuple[FoundLetter, Sequence[Redriven]]], width: int) -> RenderableType:
    """Return a table with a row per letter, with fewer columns in a narrow terminal.

    Args:
        found: Letters with their redrives; the column for redrives is left out if there are none.
        width: The width of the terminal, in characters.
    """
    from rich.table import Table
    from rich.text import Text

    wide = width >= _WIDE
    any_sent = any(sent for _, sent in found)
    middle = ["SINK OR TASK", "MESSAGE", "KEY"] if wide else [] if any_sent else ["SINK OR TASK"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("LETTER", "WRITTEN (UTC)", "KIND"):
        table.add_column(name, no_wrap=True)
    for name in (*middle, "REDRIVEN (UTC)") if any_sent else middle:
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=None if wide else _NARROW_CELL)
    table.add_column("ERROR", no_wrap=wide, overflow="ellipsis" if wide else "fold")
    for each, sent in found:
        *cells, error = _make_row(each)
        shown = cells[: 3 + len(middle)] + ([_describe_sent(sent)] if any_sent else [])
        # Text, not str, in which rich would interpret markup.
        table.add_row(*(Text(plain(cell)) for cell in (*shown, error)))
    return table


def _describe_sent(sent: Sequence[Redriven]) -> str:
    if not sent:
        return "-"
    times = f" ({len(sent)} times)" if len(sent) > 1 else ""
    return f"{format_seconds(sent[-1].at)[5:16]} to {sent[-1].to}{times}"


def _make_row(found: FoundLetter) -> tuple[str, ...]:
    letter = found.letter
    if letter is None:
        where = "-" if found.file else f"at {found.partition}/{found.offset}"
        return ("-", "-", "no letter", "-", where, "-", found.problem)
    first = letter.sources[0] if letter.sources else None
    more = f" +{len(letter.sources) - 1}" if len(letter.sources) > 1 else ""
    return (
        letter.letter_id[:_ID],
        letter.timestamp[:19].replace("T", " "),
        letter.kind.value,
        f"{letter.sink_type}.{letter.sink_name}" if letter.sink_name else letter.task_id or "-",
        locate(first) + more if first else "-",
        (show_bytes(first.key) or "-") if first else "-",
        letter.error.strip().partition("\n")[0],
    )


def describe_letter(
    found: FoundLetter, config: str = "", sent: Sequence[Redriven] = (), max_redrives: int = 1_000
) -> str:
    """Return all contents of a letter as readable text.

    Args:
        found: The letter and its position.
        config: The configuration file that was given, for the suggested commands.
        sent: The redrives of the letter.
        max_redrives: How often a message is redriven unless a command says otherwise.
    """
    letter = found.letter
    assert letter is not None
    where = f"{found.file}, row {found.offset}" if found.file else f"dead-letter topic {found.partition}/{found.offset}"
    lines = [f"letter      {letter.letter_id}  ({where})"]
    facts = (
        ("written", letter.timestamp),
        ("kind", letter.kind.value),
        ("error", letter.error),
        ("attempts", str(letter.attempt_count)),
        ("redrives", str(letter.redrives)),
        ("redriven", "\n".join(f"{format_seconds(each.at)} UTC to {each.to}" for each in sent)),
        ("sink", f"sinks.{letter.sink_type}.{letter.sink_name}" if letter.sink_name else ""),
        ("task", letter.task_id or ""),
        ("arguments", " ".join(letter.args)),
        ("exit code", "" if letter.exit_code is None else str(letter.exit_code)),
        ("stderr", letter.stderr),
    )
    lines += [f"{name:<11} {_indent(text)}" for name, text in facts if text]
    for payload in letter.original_payloads:
        lines.append(f"{'payload':<11} {_indent(_shorten(payload))}")
    for source in letter.sources:
        lines += _describe_source(source)
    if letter.sources_dropped:
        lines.append(f"{'messages':<11} {letter.sources_dropped} more, whose positions did not fit into the letter")
    commands = suggest_commands(letter, config, again=bool(sent), max_redrives=max_redrives)
    lines += ["", *(f"{what}:  {command}" for what, command in commands.items())]
    return "\n".join(lines)


def _describe_source(source: LetterSource) -> list[str]:
    at = f" of {format_seconds(source.timestamp / 1000)} UTC" if source.timestamp >= 0 else ""
    lines = [f"{'message':<11} {locate(source)}{at}"]
    lines.append(f"{'  key':<11} {_describe_value(source.key)}")
    if source.headers_error is not None:
        lines.append(f"{'  headers':<11} (unreadable) {_indent(_shorten(source.headers_error))}")
    for name, value in source.headers:
        lines.append(f"{'  header':<11} {plain(name)}: {_describe_value(value)}")
        if name == HISTORY_HEADER:
            lines += [f"{'':<11}   {line}" for line in _describe_history(value)]
    lines.append(f"{'  value':<11} {_describe_value(source.value)}")
    return lines


def _describe_history(value: str | Blob | None) -> Iterable[str]:
    text = show_bytes(value) or ""
    for entry in read_history_header([(HISTORY_HEADER, text.encode())]):
        known = {name: plain(str(entry.get(name, "?"))) for name in ("timestamp", "kind", "error", "letter_id")}
        yield f"{known['timestamp'][:19]} {known['kind']}: {known['error']} (letter {known['letter_id'][:_ID]})"


def _describe_value(value: str | Blob | None) -> str:
    if value is None:
        return "(none)"
    if isinstance(value, str):
        return _indent(_shorten(value))
    if value.base64 is not None:
        return f"(base64) {_shorten(value.base64)}"
    if value.text is not None:
        return _indent(_shorten(value.text))
    if value.length is None:
        return "(not in the letter; read it from its position, unless retention has removed it)"
    return f"({value.length:,} bytes, too large for the letter; SHA-256 {value.sha256})"


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters; use --json for all)"


def _indent(text: str) -> str:
    return plain(text.rstrip("\n"), lines=True).replace("\n", "\n" + " " * 12)


def encode_stats(stats: LetterStats) -> str:
    return json.dumps(
        {
            "letters": stats.letters,
            "messages": stats.messages,
            "no_letters": stats.no_letters,
            "redriven_before": stats.redriven,
            "oldest": _format_iso(stats.oldest),
            "newest": _format_iso(stats.newest),
            **{f"by_{group}": counts for group, counts in stats.counts.items()},
        }
    )


def _format_iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def describe_stats(stats: LetterStats) -> str:
    """Return counts as readable text, with the first ten of each group."""
    lines = [f"{format_count(stats.letters, 'dead letter')}, {format_count(stats.messages, 'message')}"]
    if stats.oldest is not None and stats.newest is not None:
        lines.append(f"oldest {format_seconds(stats.oldest)}, newest {format_seconds(stats.newest)} (UTC)")
    if stats.redriven:
        lines.append(f"{stats.redriven:,} of these letters hold messages that had been redriven before")
    if stats.no_letters:
        lines.append(f"not dead letters: {format_count(stats.no_letters, 'record')}")
    for group, counts in stats.counts.items():
        if counts:
            lines += ["", f"by {group}", *_list_counts(counts, last=group == "day")]
    return "\n".join(lines)


def _list_counts(counts: Mapping[str, int], *, last: bool) -> list[str]:
    items = list(counts.items())
    shown = items[-10:] if last else items[:10]
    lines = [f"{count:>10,}  {plain(value)}" for value, count in shown]
    if len(items) > len(shown):
        rest = sum(counts.values()) - sum(count for _, count in shown)
        lines.append(f"{rest:>10,}  in {len(items) - len(shown)} more; use --json for all")
    return lines


def render_json(value: Any) -> str:
    """Return a value as one line of JSON."""
    return msgspec.json.encode(value).decode()
