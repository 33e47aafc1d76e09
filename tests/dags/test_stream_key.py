"""Keys of shared streams as text."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field

from tidemill.dags.triggers.stream_key import write_key


@dataclass(frozen=True)
class Key:
    topics: frozenset[str]
    group: str | None = None
    client: object = field(default=None, compare=False)


def test_equal_keys_have_the_same_text_in_every_process() -> None:
    code = (
        "from tidemill.dags.triggers.stream_key import write_key\n"
        "print(write_key(('kafka', frozenset(f'topic{n}' for n in range(50)))))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in "123"
    }
    assert len(texts) == 1


def test_what_is_not_compared_is_not_written() -> None:
    first, second = Key(frozenset({"a"}), client=object()), Key(frozenset({"a"}), client=object())
    assert first == second
    assert write_key(first) == write_key(second) == "Key(topics={'a'}, group=None)"


def test_a_text_is_short_and_can_be_stored() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "\0\ud800ü"

    assert write_key(Odd()) == "\\0\\ud800\\xfc"
    long, other = "x" * 5000, "x" * 4999 + "y"
    assert len(write_key(long)) == 500
    assert write_key(long) != write_key(other)
