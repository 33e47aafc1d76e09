"""Checks every request before a page or an answer is built, and sets the security headers of every response.

Invariants: only health checks, static files and the login page need no login. An unknown host name is rejected, so that
no foreign page can reach this server through DNS rebinding. A change requires the role operate, the CSRF token of the
session, and an allowed origin. A body is at most 1 MiB. A request takes at most 30 s, except for live streams and
downloads. Forwarded headers are ignored.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.web.access.logins import Logins, UserIdentity
from tidemill.web.access.origins import Origins
from tidemill.web.problems import RequestProblem, answer_problem

MAX_BODY_BYTES = 1024 * 1024
REQUEST_SECONDS = 30.0
#: Answered for every client and host name: probes have no login, and address the server by its IP.
HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
LIVE_PATH = "/api/v1/live"
#: Responses that last as long as their client reads.
_STREAMS = (LIVE_PATH, "/api/v1/recordings/download")
#: The only page below `/api/`.
DOCS_PATH = "/api/docs"
_STATIC = "/static/"
_SAFE = ("GET", "HEAD", "OPTIONS")
_METHODS = (*_SAFE, "POST")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Not no-referrer: browsers would then send forms with the origin "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Wraps an application.

    Args:
        app: The guarded application.
        logins: Authenticates users and tokens.
        origins: Decides which host names and origins are allowed.
        cookie: The name of the login cookie; it contains the port because all ports of a host share cookies.
        request_seconds: How long a request may take.
    """

    def __init__(
        self, app: ASGIApp, logins: Logins, origins: Origins, cookie: str, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self._app = app
        self._logins = logins
        self._origins = origins
        self._cookie = cookie
        self._request_seconds = request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        is_begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                _add_headers(MutableHeaders(scope=message), scope["path"])
            await send(message)

        self._strip_prefix(scope)
        if scope["method"] == "HEAD" and scope["path"] not in _STREAMS:
            scope = {**scope, "method": "GET"}  # the server omits the body
        try:
            async with asyncio.timeout(self._request_seconds) as limit:
                await self._answer(scope, receive, send_guarded, limit)
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the application
            if not is_begun:
                text = f"the request was not received and answered within {self._request_seconds:g} s"
                await answer_problem(408, text)(scope, receive, send_guarded)
        except RequestProblem as problem:
            await problem.response(scope, receive, send_guarded)

    def _strip_prefix(self, scope: Scope) -> None:
        """Remove the prefix from the path, unless a proxy has already removed it."""
        prefix = self._origins.prefix
        path = scope["path"]
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            scope["path"] = path.removeprefix(prefix) or "/"
            scope["raw_path"] = quote(scope["path"]).encode()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, limit: asyncio.Timeout) -> None:
        path, method, headers = scope["path"], scope["method"], Headers(scope=scope)
        if path in HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        identity = self._find_token(headers)
        host = headers.get("host", "")
        if identity is None and not self._origins.is_host(host):
            raise RequestProblem(
                421,
                f"this server does not answer to the host name {host or '(none)'}; to use that name, add it to "
                "debug.allowed_hosts",
            )
        if method not in _METHODS:
            raise RequestProblem(405, f"{method[:20]} is not supported", {"Allow": ", ".join(_METHODS)})
        body = b"" if method in _SAFE else await _read_body(headers, receive)
        if method not in _SAFE:
            self._refuse_foreign(headers, host, identity)
        if identity is None:
            identity = self._logins.find_session(self._read_cookie(headers))
        if identity is None and not (path == LOGIN_PATH or path.startswith(_STATIC)):
            await self._ask_for_login(scope, receive, send)
            return
        if identity is not None and method not in _SAFE and path != LOGIN_PATH:
            _refuse_change(identity, headers, body, is_logout=path == LOGOUT_PATH)
        if path in _STREAMS and method in _SAFE:  # a stream: its client is authenticated and has sent the whole request
            limit.reschedule(None)
        state = scope.setdefault("state", {})
        state["identity"] = identity
        state["is_known"] = functools.partial(self._is_known, headers)
        await self._app(scope, receive if method in _SAFE else _replay(body, receive), send)

    def _find_token(self, headers: Headers) -> UserIdentity | None:
        sent = headers.get("authorization")
        if sent is None:
            return None
        kind, _, token = sent.partition(" ")
        identity = self._logins.find_token(token.strip()) if kind.lower() == "bearer" else None
        if identity is None:
            raise RequestProblem(
                401,
                "unknown token; add its hash to debug.tokens, and send it as `Authorization: Bearer TOKEN`",
                {"WWW-Authenticate": "Bearer"},
            )
        return identity

    def _is_known(self, headers: Headers) -> bool:
        """Return whether the sender of a request is still logged in."""
        if "authorization" in headers:
            return True  # tokens do not expire
        return self._logins.find_session(self._read_cookie(headers)) is not None

    def _refuse_foreign(self, headers: Headers, host: str, token: UserIdentity | None) -> None:
        """Reject a change that a foreign page requests. Browsers send the origin of every change; programs do not."""
        origin = headers.get("origin")
        if origin is None and token is not None:
            return
        if origin is None or not self._origins.is_same(origin, host):
            raise RequestProblem(
                403, f"changes are accepted from pages of this server only, not from {origin or 'an unknown origin'}"
            )

    def _read_cookie(self, headers: Headers) -> str | None:
        return cookie_parser(headers.get("cookie", "")).get(self._cookie)

    async def _ask_for_login(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/") and scope["path"] != DOCS_PATH:
            text = "log in first, or send a token (`Authorization: Bearer TOKEN`)"
            raise RequestProblem(401, text, {"WWW-Authenticate": "Bearer"})
        query = scope["query_string"].decode("latin-1")
        # The printed address leads to the first page; on other pages `key` filters by message key.
        is_printed = scope["path"] == "/" and self._logins.key is not None
        key = parse_qs(query).get("key", [""])[0] if is_printed else ""
        if key:
            query = urlencode([(name, text) for name, text in parse_qsl(query, True) if name != "key"])
        wanted = scope["path"] + (f"?{query}" if query else "")
        target = f"{self._origins.prefix}{LOGIN_PATH}?" + (f"key={quote(key, safe='')}&" if key else "")
        response = RedirectResponse(f"{target}next={quote(wanted, safe='')}", 303)
        if Headers(scope=scope).get("hx-request"):  # a fragment of a page whose login has expired
            response.headers["HX-Redirect"] = target
            response.status_code = 401
        await response(scope, receive, send)


def _add_headers(headers: MutableHeaders, path: str) -> None:
    for name, value in _HEADERS.items():
        headers[name] = value
    if not path.startswith(_STATIC):
        headers["Cache-Control"] = "no-store"


def _refuse_change(identity: UserIdentity, headers: Mapping[str, str], body: bytes, *, is_logout: bool) -> None:
    if identity.csrf:
        sent = headers.get("x-csrf-token", "")
        if not sent and headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            sent = parse_qs(body.decode("latin-1")).get("csrf", [""])[0]
        if not secrets.compare_digest(sent.encode(), identity.csrf.encode()):
            raise RequestProblem(403, "this page belongs to an earlier login; reload it and try again")
    if not (is_logout or identity.may_operate):
        raise RequestProblem(403, f"{identity.name} may only read; changes require the role operate")


async def _read_body(headers: Headers, receive: Receive) -> bytes:
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise RequestProblem(400, "the header Content-Length is not a number")
    if int(length) > MAX_BODY_BYTES:
        raise _refuse_large()
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestProblem(400, "the client disconnected")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise _refuse_large()
        if not message.get("more_body"):
            return b"".join(parts)


def _refuse_large() -> RequestProblem:
    return RequestProblem(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
