"""An HTTP server whose answers are the pages of a list."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@contextlib.contextmanager
def serve_pages(count: int, build: Callable[[int, str | None], object], seconds: float = 0.0) -> Iterator[str]:
    """Yield the URL of the first page.

    Args:
        count: How many pages there are.
        build: Returns the JSON of a page, given its number and the relative URL of the next one.
        seconds: How long an answer takes.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            number = int(parse_qs(urlsplit(self.path).query).get("page", ["0"])[0])
            data = json.dumps(build(number, f"?page={number + 1}" if number + 1 < count else None)).encode()
            time.sleep(seconds)
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/items"
    finally:
        server.shutdown()
        server.server_close()
