"""What Kafka allows as names and addresses."""

from __future__ import annotations

import re

import pytest

from tidemill.config.kafka_names import check_brokers
from tidemill.config.settings import Settings


@pytest.mark.parametrize("text", ["a:9092", "a:1, b:65535", "[::1]:9092", "SASL_SSL://a:9093", "a:9092,", ""])
def test_brokers_are_hosts_with_ports(text: str) -> None:
    assert check_brokers(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost", "'localhost' has no port; write host:port, for example localhost:9092"),
        ("a:9092,b", "'b' has no port; write host:port, for example b:9092"),
        ("[::1]", "has no port"),
        ("a:", "'a:' is not host:port with a port from 1 to 65535"),
        (":9092", "is not host:port"),
        ("a:0", "is not host:port"),
        ("a:65536", "is not host:port"),
        ("a:kafka", "is not host:port"),
    ],
)
def test_an_address_without_a_port_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_brokers(text)


def test_all_sections_with_brokers_check_them() -> None:
    values = {
        "kafka": {"brokers": "a"},
        "dlq": {"brokers": "b"},
        "sinks": {"kafka": {"out": {"topic": "t", "brokers": "c"}}},
    }
    with pytest.raises(ValueError, match="3 validation errors"):
        Settings.model_validate(values)
