"""Places of messages as people write them."""

from __future__ import annotations

import pytest

from tidemill.core.recorder.position import MessagePosition, parse_position


def test_a_place_is_topic_partition_and_offset():
    assert parse_position("my.topic_1-x:0:9223372036854775807") == MessagePosition("my.topic_1-x", 0, 2**63 - 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "orders",
        "orders:1",
        "a:b:1:2",
        "orders:-1:2",
        "orders:1:x",
        "orders:2147483648:1",
        "o:1:9223372036854775808",
        "o:١:1",
        "a/b:1:2",
    ],
)
def test_anything_else_is_not_a_place(text: str):
    assert parse_position(text) is None
