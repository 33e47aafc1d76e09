"""Renders bytes of a message as JSON, text or hex, limited in size and with secrets masked.

Invariant: the text can be encoded, and shows at most `MAX_BYTES` of the bytes. Secrets are masked where they can be
recognised: by their keys in JSON, and by their form in text.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from typing import Literal

from pydantic import BaseModel, Field

from tidemill.config.redaction import MASK, is_secret, redact, redact_text
from tidemill.core.errors import escape_surrogates

MAX_BYTES = 1024 * 1024
#: Hex takes four times the space, and 64 KiB are more than enough to read.
MAX_HEX_BYTES = 64 * 1024
_HEX_COLUMNS = 16
_WHITE = "\t\n\r"


class Shown(BaseModel):
    """Bytes in readable form."""

    kind: Literal["null", "json", "text", "binary"]
    text: str = Field(description="JSON is indented; binary data is shown as hex; secrets are masked.")
    size_bytes: int
    is_cut: bool = Field(description="Whether the text is truncated.")


def show(data: bytes | None, name: str = "") -> Shown:
    r"""Return bytes in readable form.

    Args:
        data: The bytes; None: null.
        name: The name of the value, such as a header's; some names mark the value as a secret.

    Example:
        >>> show(b'{"password": "x", "n": 1}').text
        '{\n  "password": "***",\n  "n": 1\n}'
        >>> show(bytes([0, 255, 65])).text
        '00000000  00 ff 41                                          ..A'
    """
    if data is None:
        return Shown(kind="null", text="", size_bytes=0, is_cut=False)
    is_cut = len(data) > MAX_BYTES
    text = _decode(data[:MAX_BYTES], is_whole=not is_cut)
    if text is None:
        hexed = _dump(data[:MAX_HEX_BYTES])
        return Shown(kind="binary", text=hexed, size_bytes=len(data), is_cut=len(data) > MAX_HEX_BYTES)
    pretty = None if is_cut else _indent(text)
    kind: Literal["json", "text"] = "text" if pretty is None else "json"
    masked = pretty if pretty is not None else redact_text(text)
    masked = redact({name: masked})[name] if name else masked
    return Shown(kind=kind, text=escape_surrogates(str(masked)), size_bytes=len(data), is_cut=is_cut)


def mask_text(text: str, name: str = "") -> str:
    """Return a text with its secrets masked as by `show`; a text without secrets is returned unchanged.

    Example:
        >>> mask_text('{"n":1}'), mask_text('{"password":"x","n":1}'), mask_text("hunter2", "authorization")
        ('{"n":1}', '{"password": "***", "n": 1}', '***')
    """
    if name and is_secret(name) and text:
        return MASK
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            given = {"": json.loads(text)}
            masked = redact(given)
            return text if masked == given else json.dumps(masked[""], ensure_ascii=False)
    return redact_text(text)


def _decode(data: bytes, *, is_whole: bool) -> str | None:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, is_whole)
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() or all(char.isprintable() or char in _WHITE for char in set(text)) else None


def _indent(text: str) -> str | None:
    """Return indented JSON with its secrets masked; None if the text is not a JSON object or array."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        found = redact({"": json.loads(text)})[""]
        return json.dumps(found, ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return None


def _dump(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), _HEX_COLUMNS):
        row = data[start : start + _HEX_COLUMNS]
        chars = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<{_HEX_COLUMNS * 3 + 1}} {chars}")
    return "\n".join(lines)
