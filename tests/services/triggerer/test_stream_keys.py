"""How the keys of shared streams are shown."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tidemill.services.triggerer.hosting.stream_keys import describe_key
from tidemill.triggers.producers.directory import DirectorySettings


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("upstream", "upstream"),
        (("sqs", "orders", None, ""), "sqs orders"),
        (("mine", 7, ("a", "b")), "mine 7 a b"),
        (("directory", DirectorySettings("/in box")), "directory /in box"),
        (("directory", DirectorySettings("/in", recursive=True)), "directory /in recursive=True"),
    ],
)
def test_a_key_is_shown_without_the_punctuation_of_python(key: Hashable, shown: str) -> None:
    assert describe_key(key) == shown
