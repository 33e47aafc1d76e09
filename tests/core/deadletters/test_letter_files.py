"""Files of dead letters: which of them are valid, and journals that were truncated by a crash or edited."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.deadletters.letter_files import (
    JournalEntry,
    build_run_pattern,
    build_unfinished_pattern,
    decode_journal,
    encode_journal,
    is_valid,
    name_letters_file,
    name_unfinished_file,
)

ENTRIES = st.builds(JournalEntry, st.text(), st.text(), st.integers(0, 2**40), st.text())


def test_a_name_belongs_to_one_run_and_one_part() -> None:
    names = {name_letters_file(run, part) for run in ("a", "b") for part in ("part-0.parquet", "part-1.parquet")}
    assert len(names) == 4
    assert all(fnmatchcase(name, build_run_pattern("a")) == ("-a-" in name) for name in names)


def test_unfinished_files_have_names_that_readers_skip_and_the_next_run_finds() -> None:
    names = {name_unfinished_file(outcomes, engine, part) for outcomes in "ab" for engine in "ef" for part in (0, 1)}
    assert len(names) == 8
    assert all(name.startswith("_") for name in names)
    assert sum(fnmatchcase(name, build_unfinished_pattern("a")) for name in names) == 4


@pytest.mark.parametrize(
    ("outcomes_id", "named", "wanted"),
    [
        ("x", "letters-1", True),  # the part is published
        ("x", None, False),  # a crash between the two names
        ("x", "letters-2", False),  # another run did this part
        ("x", "", False),  # a retry of the part had no letters
        (None, None, True),  # the outcomes were removed
        ("y", "letters-2", True),  # another folder of the same name
    ],
)
def test_a_file_is_valid_unless_its_part_will_be_or_was_processed_again(outcomes_id, named, wanted) -> None:
    assert is_valid("letters-1", "x", outcomes_id, named) is wanted


@given(st.lists(ENTRIES))
def test_the_last_entry_of_a_file_counts(entries: list[JournalEntry]) -> None:
    assert decode_journal(encode_journal(entries)) == {each.file: each for each in entries}


@given(st.lists(ENTRIES, min_size=1), st.data())
def test_a_truncated_journal_keeps_all_complete_lines(entries: list[JournalEntry], data: st.DataObject) -> None:
    *before, last = entries
    text, line = encode_journal(before), encode_journal([last])
    torn = line[: data.draw(st.integers(0, len(line) - 1))]
    assert decode_journal(text + torn) == {each.file: each for each in before}


@pytest.mark.parametrize(
    "line", ["", "no JSON", "[]", "{}", '{"tidemill": 2}', '{"tidemill": 1, "file": "a", "mark": "", "position": "x"}']
)
def test_an_invalid_line_is_reported_by_its_number(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not an entry of a redrive"):
        decode_journal(encode_journal([JournalEntry("a", "m", 1, "")]) + line + "\n")
