r"""Message keys as texts that users can read, copy and enter.

A key is any sequence of bytes. Its text is the UTF-8 decoding. Bytes that would be invisible, or would act on a
terminal or a page, are written as `\xNN`, one per byte, and backslashes are doubled.

Invariant: `read_key(write_key(key)) == key`.
"""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"\\(?:x(?P<byte>[0-9a-fA-F]{2})|\\)")


def write_key(key: bytes) -> str:
    r"""Return the text of a key.

    Example:
        >>> print(write_key("é:7".encode()), write_key(b"\xff\0a\\b"))
        é:7 \xff\x00a\\b
    """
    text = key.decode("utf-8", "surrogateescape")
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return "".join(map(_write_char, text))


def _write_char(char: str) -> str:
    if char == "\\":
        return r"\\"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def read_key(text: str) -> bytes:
    r"""Return the key that a text stands for; a backslash that begins no escape stands for itself.

    Example:
        >>> read_key(r"\xff\x00a\\b"), read_key(r"C:\dir")
        (b'\xff\x00a\\b', b'C:\\dir')
    """
    return b"".join(_read_parts(text))


def _read_parts(text: str) -> list[bytes]:
    parts: list[bytes] = []
    end = 0
    for found in _ESCAPED.finditer(text):
        parts.append(_encode(text[end : found.start()]))
        parts.append(b"\\" if found["byte"] is None else bytes.fromhex(found["byte"]))
        end = found.end()
    parts.append(_encode(text[end:]))
    return parts


def _encode(text: str) -> bytes:
    # Command lines represent bytes that are not UTF-8 as surrogates.
    return text.encode("utf-8", "surrogateescape")
