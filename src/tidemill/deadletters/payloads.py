"""Payloads in letters: encodes a hook's payload as readable JSON, and restores it for the sink.

Any payload has a JSON form. The field `_types` stores what JSON cannot express: by JSON pointer, which values were
times, decimals or bytes, and which data has no JSON form at all and is only shown. Invariant: a restored payload equals
the encoded one, or an error names what was lost.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import json
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tidemill.sinks.non_finite import is_model, read_dump

#: The field for everything that JSON cannot express.
TYPES_FIELD = "_types"
#: The field that sinks of JSON get in its JSON form.
_DATA = "data"
#: Marks data that looks like a `Blob` but is plain data.
_JSON = "json"
#: Marks data without a JSON form, which is only shown to people.
_SHOWN = "shown"
#: Marks bytes inside a pydantic model, which writes them as text.
_UTF8 = "utf8"
#: Floats without a JSON form, as Python names them. JSON sinks get them as floats, too: their configuration decides
#: about them, and null would be another value.
_NUMBERS = frozenset({"nan", "inf", "-inf"})
#: The prefix for such a number in a pydantic model, where the JSON has the model's own form of it.
_IN_MODEL = "model "
#: The prefix if the model writes the number as NaN or Infinity, which is not JSON.
_CONSTANT = "constant "

_TYPED: Mapping[str, type] = {
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "bytes": bytes,
}
_NAMES = {known: name for name, known in _TYPED.items()}
#: Fields that every letter shows if the payload has them.
_ALWAYS = frozenset({"sink", "key", "path", "data"})
_BLOB_KEYS = ({"base64"}, {"text"}, {"length", "sha256"})


class Blob(msgspec.Struct, omit_defaults=True):
    """Bytes in JSON: as base64, as UTF-8 text, or, if they were dropped, as their size and digest.

    Without any of these, not even the size of the dropped bytes is known.
    """

    base64: str | None = None
    text: str | None = None
    length: int | None = None
    sha256: str | None = None

    @property
    def dropped(self) -> bool:
        """Whether the bytes were dropped."""
        return self.base64 is None and self.text is None

    def to_bytes(self) -> bytes:
        """Return the bytes; b'' if they were dropped."""
        if self.base64 is not None:
            return base64.b64decode(self.base64)
        return (self.text or "").encode()


class PayloadLostError(ValueError):
    """A payload cannot be restored from its letter; the text gives the reason."""


def encode_payload(payload: Any) -> str:
    """Return a payload as a JSON string with all its fields; bytes become a `Blob`, models use their own JSON dump.

    Fields at their defaults are left out if the payload's class does so, except for `_ALWAYS`.
    """
    fields = {name: getattr(payload, name) for name in getattr(payload, "__struct_fields__", ())}
    # Payloads for sinks of other packages are restored from their fields alone, so they need all of them.
    if fields and "type" not in fields and payload.__struct_config__.omit_defaults:
        for field in msgspec.structs.fields(payload):
            value = fields[field.name]
            # Compared by type first, because a user's object may not be comparable.
            if field.name not in _ALWAYS and type(value) is type(field.default) and value == field.default:
                del fields[field.name]
    types: dict[str, str] = {}
    plain = {name: _encode_field(name, value, types) for name, value in (fields or {"data": payload}).items()}
    if types:
        plain[TYPES_FIELD] = types
    return encode_json(plain).decode()


def _encode_field(name: str, value: Any, types: dict[str, str]) -> Any:
    if isinstance(value, bytes):
        try:
            return Blob(text=value.decode())
        except UnicodeDecodeError:
            return Blob(base64=base64.b64encode(value).decode())
    try:
        raw = _json_strict(value)
        _note_types(_escape(name), value, types)
    except BaseException:  # a user's object may raise any exception, which may be the reason for this letter
        types[_escape(name)] = _SHOWN
        return _encode_leniently(value)
    if raw.startswith(b"{") and _is_blob(msgspec.json.decode(raw)):
        types[_escape(name)] = _JSON
    return msgspec.Raw(raw)


def _encode_leniently(value: Any) -> Any:
    try:
        return msgspec.Raw(_json_lenient(value))
    except BaseException:  # a user's object may raise any exception
        return _show(value)


def _note_types(path: str, value: Any, types: dict[str, str], model: str = "") -> None:
    """Record the types that the JSON form loses; `model` is the prefix for numbers inside a model."""
    if value is None or isinstance(value, (str, bool, int, msgspec.Raw)):
        return
    if is_model(value):
        _note_types(path, value.model_dump(), types, _IN_MODEL)
        _note_types(path, read_dump(value), types, _CONSTANT)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _note_types(f"{path}/{_escape(_name_key(key))}", item, types, model)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            _note_types(f"{path}/{index}", item, types, model)
    elif isinstance(value, float):
        if not math.isfinite(value):
            types[path] = f"{model}{value}"
    elif type(value) in _NAMES:
        types[path] = _UTF8 if model and isinstance(value, bytes) else _NAMES[type(value)]
    elif not model:
        # Dataclasses, enumerations and similar types.
        plain = msgspec.to_builtins(value, builtin_types=_NAMES, enc_hook=lambda model: None)
        if isinstance(plain, (dict, list, float)):
            _note_types(path, plain, types)


def restore_fields(payload: str, *, typed: bool) -> dict[str, Any]:
    """Return a payload's fields as they were.

    Args:
        payload: From `encode_payload`.
        typed: Restore times, decimals and similar values in `data` to their types (for SQL and MongoDB) instead of
            their JSON form. In other fields, such as headers, they are always restored, as are NaN and infinities.

    Raises:
        PayloadLostError: The payload was too large for its letter, or has no JSON form.
    """
    try:
        fields = msgspec.json.decode(payload, type=dict[str, Any])
        types = msgspec.convert(fields.pop(TYPES_FIELD, {}), dict[str, str])
    except msgspec.MsgspecError as error:
        raise PayloadLostError(f"not a payload: {error}") from None
    for name, value in fields.items():
        kind = types.pop(_escape(name), None)
        if kind == _SHOWN:
            raise PayloadLostError(f"its {name} has no JSON form; the letter only shows it")
        if kind in (None, _JSON):
            fields[name] = value if kind == _JSON or not _is_blob(value) else _restore_bytes(name, value)
        elif typed or name != _DATA:
            fields[name] = _convert(kind, value)
        elif kind in _NUMBERS or kind.startswith(_CONSTANT):
            fields[name] = _convert_for_json(kind, value)
    for path, kind in types.items():
        if typed or path.partition("/")[0] != _DATA:
            _convert_at(fields, path, _convert, kind)
        elif kind in _NUMBERS or kind.startswith(_CONSTANT):
            _convert_at(fields, path, _convert_for_json, kind)
    return fields


def _restore_bytes(name: str, value: dict[str, Any]) -> bytes:
    blob = msgspec.convert(value, Blob)
    if blob.dropped:
        raise PayloadLostError(f"its {name} of {blob.length} bytes was too large for the letter")
    return blob.to_bytes()


def _convert_at(fields: dict[str, Any], path: str, convert: Callable[[str, Any], Any], kind: str) -> None:
    parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
    inner: Any = fields
    try:
        for part in parts[:-1]:
            inner = inner[int(part) if isinstance(inner, list) else part]
        last: Any = int(parts[-1]) if isinstance(inner, list) else parts[-1]
        inner[last] = convert(kind, inner[last])
    except (KeyError, IndexError, TypeError, ValueError):
        raise PayloadLostError(f"its {path} is no longer a {kind}") from None


def _convert(kind: str, value: Any) -> Any:
    if kind == _UTF8:
        return str(value).encode()
    known = _TYPED.get(kind)
    try:
        return float(kind.rpartition(" ")[2]) if known is None else msgspec.convert(value, known)
    except ValueError as error:  # msgspec's own error is a ValueError
        raise PayloadLostError(f"{value!r} is not a {kind}: {error}") from None


def _convert_for_json(kind: str, value: Any) -> Any:
    name, _, number = kind.rpartition(" ")
    if not name:
        return float(kind)
    # The spelling of Python and pydantic.
    return msgspec.Raw(json.dumps(float(number)).encode())


def drop_body(payload: str) -> str:
    """Drop the large fields of a payload; their length and digest, as the sink would have received them, remain."""
    fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    types = msgspec.json.decode(fields.pop(TYPES_FIELD, b"{}"), type=dict[str, str])
    kept: dict[str, Any] = {}
    for name, raw in fields.items():
        body = bytes(raw)
        if len(body) <= 200:
            kept[name] = raw
            continue
        value = msgspec.json.decode(body)
        path = _escape(name)
        if path not in types and _is_blob(value):
            blob = msgspec.convert(value, Blob)
            if blob.dropped:
                kept[name] = raw
                continue
            body = blob.to_bytes()
        types = {other: kind for other, kind in types.items() if other.split("/")[0] != path}
        kept[name] = make_digest(body)
    if types:
        kept[TYPES_FIELD] = types
    return encode_json(kept).decode()


def make_digest(body: bytes) -> Blob:
    """Return the length and SHA-256 of bytes."""
    return Blob(length=len(body), sha256=hashlib.sha256(body).hexdigest())


def _is_blob(value: Any) -> bool:
    return isinstance(value, dict) and set(value) in _BLOB_KEYS


def _escape(name: str) -> str:
    """Return a name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _name_key(key: Any) -> str:
    """Return the JSON name of a mapping's key; for enumerations and times it differs from their `str`."""
    return key if type(key) is str else next(iter(msgspec.to_builtins({key: None}, str_keys=True)))


def _encode_any(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump is not None else _show(value)


def _encode_model(value: Any) -> Any:
    if is_model(value):
        return read_dump(value)
    # PostgreSQL and MongoDB accept NumPy's float64, a subclass of float; JSON sinks refuse it.
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _show(value: Any) -> str:
    try:
        return repr(value)[:10_000]
    except BaseException:  # a user's object may raise any exception
        return f"<a {type(value).__name__} that cannot be shown>"


_json_strict = msgspec.json.Encoder(enc_hook=_encode_model).encode
_json_lenient = msgspec.json.Encoder(enc_hook=_encode_any).encode


def encode_json(value: Any) -> bytes:
    """Encode for a letter; lone surrogates in text (file names, arguments) are replaced, not refused."""
    try:
        return _json_lenient(value)
    except UnicodeEncodeError:
        return _json_lenient(_replace_surrogates(msgspec.to_builtins(value, enc_hook=_encode_any)))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_surrogates(item) for item in value]
    return value
