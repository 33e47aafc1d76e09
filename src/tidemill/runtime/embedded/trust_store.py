"""The certificate authorities that this system trusts, as a file for Java.

A Java runtime has a list of its own, without the authority of a company's proxy. Python and most programs use the
system's list instead, or the one in `SSL_CERT_FILE`; with this file Java does too. The format is JKS, which every Java
reads; a JKS trust store needs no secret password, because it contains no secrets.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import ssl
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tidemill.core.errors import ConfigError

_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
#: The start of the digest input at the end of a JKS file, after the password.
_SALT = b"Mighty Aphrodite"
_PASSWORD = "changeit"  # noqa: S105 # the well-known one, which only guards against damage
_PEM = re.compile(r"-----BEGIN (?:TRUSTED )?CERTIFICATE-----(.+?)-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL)
#: Where distributions store the whole list, for a Python that was built with other paths.
_KNOWN_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def read_certificates(environ: Mapping[str, str]) -> list[bytes]:
    """Return the certificates of the authorities that the system trusts, DER encoded.

    Args:
        environ: `SSL_CERT_FILE` and `SSL_CERT_DIR` replace the platform's certificates, as for OpenSSL.

    Raises:
        ConfigError: These variables are set, but there is no certificate at their paths.
    """
    named = {name: environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if environ.get(name)}
    if named:
        if certificates := _read_all(named.values()):
            return certificates
        settings = " and ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigError(f"{settings}: no certificate can be read there; correct the path or unset the variable")
    paths = ssl.get_default_verify_paths()
    for names in ([paths.openssl_cafile, paths.openssl_capath], *([name] for name in _KNOWN_FILES)):
        if certificates := _read_all(names):
            return certificates
    return []


def write_trust_store(certificates: Iterable[bytes], path: Path) -> None:
    """Write certificates as a JKS file.

    Args:
        certificates: The certificates, DER encoded.
        path: The file; replaced if it exists.
    """
    entries = []
    for number, certificate in enumerate(certificates):
        head = struct.pack(">i", _TRUSTED_CERTIFICATE) + _text(f"authority-{number}") + struct.pack(">q", 0)
        entries.append(head + _text("X.509") + struct.pack(">i", len(certificate)) + certificate)
    content = struct.pack(">Iii", _MAGIC, _VERSION, len(entries)) + b"".join(entries)
    password = _PASSWORD.encode("utf-16-be")
    path.write_bytes(content + hashlib.sha1(password + _SALT + content, usedforsecurity=False).digest())


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">H", len(data)) + data


def _read_all(sources: Iterable[str]) -> list[bytes]:
    """Return the certificates of files and folders, each once; unreadable ones are skipped."""
    found: dict[bytes, None] = {}
    for source in sources:
        for file in _list_files(Path(source)):
            with contextlib.suppress(OSError):
                found.update(dict.fromkeys(_parse(file.read_bytes())))
    return list(found)


def _list_files(source: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(source.iterdir()) if source.is_dir() else [source]
    return []


def _parse(data: bytes) -> Iterator[bytes]:
    for body in _PEM.findall(data.decode("ascii", "replace")):
        with contextlib.suppress(ValueError):
            certificate = base64.b64decode("".join(body.split()), validate=True)
            yield certificate[: _der_length(certificate)]


def _der_length(data: bytes) -> int:
    """Return the length of the first DER value; OpenSSL's trusted certificates have more data after it."""
    if len(data) < 2 or not data[1] & 0x80:
        return len(data)
    count = data[1] & 0x7F
    return 2 + count + int.from_bytes(data[2 : 2 + count], "big")
