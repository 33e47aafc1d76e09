"""A Kafka client as C, Go and Rust programs are: librdkafka without Python's checks of what is sent."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka

_FLUSH_MS = 10_000
_PRODUCER = 0
#: The tags of `rd_kafka_vtype_t`.
_TOPIC, _PARTITION, _VALUE, _HEADERS = 1, 3, 4, 10


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Argument(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int32),
        ("memory", _Memory),
        ("pointer", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _Tagged(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int), ("argument", _Argument))


def send_with_headers(
    brokers: str, topic: str, value: bytes, headers: Sequence[tuple[bytes, bytes]], partition: int = 0
) -> None:
    """Send one record; names of headers are bytes, whatever they are."""
    library = _load()
    error = ctypes.create_string_buffer(512)
    config = library.rd_kafka_conf_new()
    library.rd_kafka_conf_set(config, b"bootstrap.servers", brokers.encode(), error, len(error))
    producer = library.rd_kafka_new(_PRODUCER, config, error, len(error))
    assert producer, error.value
    made = library.rd_kafka_headers_new(len(headers))
    for name, content in headers:
        library.rd_kafka_header_add(made, name, len(name), content, len(content))
    arguments = (_Tagged * 4)()
    arguments[0].tag, arguments[0].argument.text = _TOPIC, topic.encode()
    arguments[1].tag, arguments[1].argument.number = _PARTITION, partition
    arguments[2].tag, arguments[2].argument.memory = _VALUE, _Memory(value, len(value))
    arguments[3].tag, arguments[3].argument.pointer = _HEADERS, made
    # A copy of the value is made only where it is asked for, so it is kept until the flush is over.
    assert library.rd_kafka_produceva(producer, arguments, len(arguments)) is None
    assert library.rd_kafka_flush(producer, _FLUSH_MS) == 0
    library.rd_kafka_destroy(producer)


def _load() -> ctypes.CDLL:
    (path,) = Path(confluent_kafka.__file__).parent.parent.glob("confluent_kafka.libs/librdkafka*.so*")
    library = ctypes.CDLL(str(path))
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures = {
        "rd_kafka_conf_new": (pointer, ()),
        "rd_kafka_conf_set": (ctypes.c_int, (pointer, text, text, text, size)),
        "rd_kafka_new": (pointer, (ctypes.c_int, pointer, text, size)),
        "rd_kafka_headers_new": (pointer, (size,)),
        "rd_kafka_header_add": (ctypes.c_int, (pointer, text, ctypes.c_ssize_t, text, ctypes.c_ssize_t)),
        "rd_kafka_produceva": (pointer, (pointer, ctypes.POINTER(_Tagged), size)),
        "rd_kafka_flush": (ctypes.c_int, (pointer, ctypes.c_int)),
        "rd_kafka_destroy": (None, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
