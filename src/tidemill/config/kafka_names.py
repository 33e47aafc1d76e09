"""Checks Kafka names and client properties before anything connects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tidemill.config.redaction import redact_text

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MAX_TOPIC = 249
_MAX_PORT = 65_535
_LOOPBACK = ("localhost", "127.", "::1", "[::1]")
#: The group's name is part of `group.instance.id`, to which Kafka's limit for names applies.
_MAX_GROUP = 100


def check_topic(name: str) -> str:
    """Return a topic's name if Kafka allows it.

    Raises:
        ValueError: Kafka does not allow it.
    """
    if name in {".", ".."} or len(name) > _MAX_TOPIC or not _NAME.fullmatch(name):
        raise ValueError(f"is not a valid topic name: {_describe_rule(_MAX_TOPIC)}, got {redact_text(name)!r}")
    return name


def describe_creation(topic: str, brokers: str) -> str:
    """Return instructions to create a missing topic: a Kafka command, and an alternative if the brokers are local.

    Example:
        >>> describe_creation("orders", "kafka:9092")
        'create it (kafka-topics.sh --bootstrap-server kafka:9092 --create --topic orders --partitions 4)'
    """
    command = f"kafka-topics.sh --bootstrap-server {brokers} --create --topic {topic} --partitions 4"
    if all(is_loopback(address) for address in brokers.split(",")):
        return f"create it ({command}; or start `tidemill broker` again with --topic {topic}:4)"
    return f"create it ({command})"


def is_loopback(address: str) -> bool:
    """Return whether a host, or host:port, is always this machine.

    Example:
        >>> is_loopback("localhost:9092"), is_loopback("[::1]:9092"), is_loopback("kafka:9092")
        (True, True, False)
    """
    return address.strip().startswith(_LOOPBACK)


def check_topic_or_empty(name: str) -> str:
    """Return a topic's name if it is empty or allowed by Kafka."""
    return check_topic(name) if name else name


def check_brokers(text: str) -> str:
    """Return a list of brokers if each is host:port.

    Raises:
        ValueError: An entry is not host:port.

    Example:
        >>> check_brokers("a:9092,SSL://b:9093")
        'a:9092,SSL://b:9093'
    """
    for entry in filter(None, map(str.strip, text.split(","))):
        host, colon, port = entry.rpartition("://")[2].rpartition(":")
        shown = redact_text(entry)
        if not colon or port.endswith("]"):
            raise ValueError(f"{shown!r} has no port; write host:port, for example {shown}:9092")
        if not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
            raise ValueError(f"{shown!r} is not host:port with a port from 1 to {_MAX_PORT}, for example kafka:9092")
    return text


def check_group(name: str) -> str:
    """Return a consumer group's name if it can be part of the engines' member ids.

    Raises:
        ValueError: It cannot be part of them.
    """
    if len(name) > _MAX_GROUP or not _NAME.fullmatch(name):
        raise ValueError(f"is not a usable group name: {_describe_rule(_MAX_GROUP)}, got {redact_text(name)!r}")
    return name


def refuse_owned(config: dict[str, Any], owned: Mapping[str, str]) -> dict[str, Any]:
    """Return a client configuration if it sets none of the keys that tidemill sets itself.

    Args:
        config: Keys and values for librdkafka.
        owned: The keys that tidemill sets, each with an alternative.

    Raises:
        ValueError: It sets some of them; the message names all.
    """
    problems = [f"{key} cannot be set here: {owned[key]}" for key in config if key in owned]
    if problems:
        raise ValueError("; ".join(problems))
    return config


def _describe_rule(length: int) -> str:
    return f"1 to {length} letters, digits, '.', '_' and '-' are allowed"
