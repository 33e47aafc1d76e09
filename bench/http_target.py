"""An HTTP server that takes everything and says how many different keys came: `python -m bench.http_target PORT`.

Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar


class Target(asyncio.Protocol):
    """One connection; understands only what the sinks' client sends."""

    keys: ClassVar[set[bytes]] = set()

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = _header(head, b"content-length")
            if len(self._data) < end + 4 + int(length or 0):
                return
            self._data = self._data[end + 4 + int(length or 0) :]
            body = b""
            if head.startswith(b"get"):
                body = b"%d" % len(self.keys)
            else:
                self.keys.add(_header(head, b"idempotency-key"))
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))  # type: ignore[attr-defined]


def _header(head: bytes, name: bytes) -> bytes:
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(Target, "127.0.0.1", port)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
