"""Who is let in, and what is refused before any page is built."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

import httpx
import pytest
import structlog
from structlog.testing import capture_logs
from tests.web.scripted_pipeline import SECRET, ScriptedPipeline
from tests.web.serving import KEY, ORIGIN, connect, log_in, make_app

from tidemill.runtime.log import setup as log_module
from tidemill.web.access import guard, logins
from tidemill.web.access.hashes import hash_password, hash_token
from tidemill.web.access.logins import Logins

TOKEN = "a-token-for-programs"
PASSWORD = "correct horse"


@functools.cache
def hash_once(password: str) -> str:
    return hash_password(password)


def with_accounts() -> ScriptedPipeline:
    """Return a pipeline with users and a token."""
    users = {name: {"hash": hash_once(PASSWORD), "role": role} for name, role in (("ann", "operate"), ("rob", "read"))}
    tokens = {"bot": {"hash": hash_token(TOKEN), "role": "read"}}
    return ScriptedPipeline({"debug": {"enabled": True, "users": users, "tokens": tokens}})


async def enter(client: httpx.AsyncClient, **form: str) -> httpx.Response:
    return await client.post("/login", data=form, headers={"Origin": ORIGIN})


@pytest.mark.parametrize("path", ["/", "/configuration", "/api/docs"])
async def test_a_page_leads_to_the_login(path: str) -> None:
    async with connect(ScriptedPipeline()) as client:
        answer = await client.get(path)
        login = await client.get(answer.headers["location"])

    assert login.status_code == 200
    assert not {"order-workers", "worker-1", "orders"} & set(re.findall(r"[\w-]+", login.text))
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login?next=%2F")
    assert "order-workers" not in answer.text


@pytest.mark.parametrize("path", ["/api/v1/overview", "/api/v1/series", "/api/v1/live", "/api/openapi.json", "/api/x"])
async def test_the_api_asks_for_a_login(path: str) -> None:
    async with connect(ScriptedPipeline()) as client:
        answer = await client.get(path)

    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"].startswith("log in first")


async def test_the_key_of_the_address_is_exchanged_for_a_cookie() -> None:
    async with connect(ScriptedPipeline()) as client:
        first = await client.get(f"/?key={KEY}")
        entered = await client.get(first.headers["location"])
        page = await client.get("/")

    cookie = entered.headers["set-cookie"]
    assert cookie.startswith("tidemill_8080=")
    assert {"HttpOnly", "Max-Age=43200", "SameSite=strict"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert '<meta http-equiv="refresh" content="0;url=/">' in entered.text
    assert page.status_code == 200
    assert KEY not in page.text


async def test_the_login_by_key_leads_to_what_the_address_shows() -> None:
    async with connect(ScriptedPipeline()) as client:
        first = await client.get(f"/?range=3600&key={KEY}&text=a%26b&empty=")
        entered = await client.get(first.headers["location"])

    assert KEY not in entered.text
    assert 'content="0;url=/?range=3600&amp;text=a%26b&amp;empty="' in entered.text


async def test_a_wrong_key_is_refused_and_keeps_nobody_out() -> None:
    async with connect(ScriptedPipeline()) as client:
        with capture_logs() as lines:
            answers = [await client.get("/login?key=wrong") for _ in range(logins.MAX_FAILURES + 1)]
        right = await client.get(f"/login?key={KEY}")

    assert [answer.status_code for answer in answers] == [403] * (logins.MAX_FAILURES + 1)
    assert right.status_code == 200
    assert "set-cookie" in right.headers
    assert "wrong" not in str([{**line, "event": ""} for line in lines])


async def test_guessing_a_password_is_slowed_down_for_that_user_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_FAILURES", 3)
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits())
    structlog.reset_defaults()
    async with connect(with_accounts()) as client:
        with capture_logs() as lines:
            answers = [await enter(client, name="eve", password="guessed") for _ in range(4)]
        other = await enter(client, name="ann", password=PASSWORD)

    assert [answer.status_code for answer in answers] == [403] * 3 + [429]
    assert 0 < int(answers[3].headers["retry-after"]) <= logins.FAILURE_SECONDS + 1
    assert other.status_code == 200
    (line,) = lines
    assert (line["event"], line["user"]) == ("a login with a wrong password was refused", "eve")
    assert line["address"] == "127.0.0.1"
    assert "guessed" not in str(line)


async def test_users_log_in_by_password_and_only_then_have_a_session() -> None:
    async with connect(with_accounts()) as client:
        by_key = await client.get(f"/login?key={KEY}")
        wrong = await enter(client, name="ann", password="wrong")
        nobody = await enter(client, name="eve", password=PASSWORD)
        assert "set-cookie" not in by_key.headers
        right = await enter(client, name="ann", password=PASSWORD, next="/configuration")
        page = await client.get("/configuration")

    assert (wrong.status_code, nobody.status_code, right.status_code) == (403, 403, 200)
    assert wrong.text == nobody.text
    assert 'url=/configuration"' in right.text
    assert page.status_code == 200


@pytest.mark.parametrize(
    "target", ["//evil.example/", "https://evil.example/", "/\\evil.example", "javascript:alert(1)"]
)
async def test_a_login_leads_to_no_other_server(target: str) -> None:
    async with connect(ScriptedPipeline()) as client:
        answer = await client.get("/login", params={"key": KEY, "next": target})

    assert 'content="0;url=/"' in answer.text


async def test_a_session_ends_after_twelve_hours_and_with_a_logout() -> None:
    now = [0.0]
    known = Logins(KEY, {}, {}, lambda: now[0])
    first, second = known.use_key(KEY, ""), known.use_key(KEY, "")
    assert known.find_session(first) is not None
    known.close(first)
    assert known.find_session(first) is None
    now[0] = logins.SESSION_SECONDS
    assert known.find_session(second) is None

    async with log_in(ScriptedPipeline()) as client:
        assert (await client.post("/logout")).status_code == 303
        assert (await client.get("/api/v1/overview")).status_code == 401


def test_the_oldest_session_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_SESSIONS", 2)
    known = Logins(KEY, {}, {})
    opened = [known.use_key(KEY, "") for _ in range(3)]
    assert [known.find_session(secret) is not None for secret in opened] == [False, True, True]


async def test_a_token_is_accepted_in_the_header_only() -> None:
    async with connect(with_accounts()) as client:
        named = {"Authorization": f"Bearer {TOKEN}", "Host": "any.name.example"}
        assert (await client.get("/api/v1/overview", headers=named)).status_code == 200
        assert (await client.get("/api/v1/overview", headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await client.get(f"/api/v1/overview?token={TOKEN}&key={TOKEN}")).status_code == 401
        reading = await client.post("/api/v1/actions/drain", json={"confirm": "order-workers"}, headers=named)

    assert reading.status_code == 403
    assert reading.json()["detail"].startswith("bot may only read")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "a b", "localhost@evil.example"]
)
async def test_a_foreign_host_name_is_refused(host: str) -> None:
    async with log_in(ScriptedPipeline()) as client:
        answer = await client.get("/", headers={"Host": host})
        health = await client.get("/healthz", headers={"Host": host})

    assert answer.status_code == 421
    assert "debug.allowed_hosts" in answer.text
    assert health.status_code == 200


async def test_hosts_of_the_configuration_are_accepted_and_forwarded_ones_are_not() -> None:
    debug = {"debug_url": "https://ops.example/mill", "allowed_hosts": ["mill.internal"]}
    async with connect(ScriptedPipeline({"debug": debug})) as client:
        statuses = [
            (await client.get("/login", headers={"Host": host})).status_code
            for host in ("ops.example", "mill.internal:8080", "localhost", "[::1]:8080")
        ]
        forwarded = {"Host": "evil.example", "X-Forwarded-Host": "localhost", "Forwarded": "host=localhost"}
        refused = await client.get("/login", headers=forwarded)

    assert statuses == [200] * 4
    assert refused.status_code == 421


@pytest.mark.parametrize(
    "changed",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "https://127.0.0.1:8080"},
        {"X-CSRF-Token": "wrong"},
        {"X-CSRF-Token": ""},
    ],
)
async def test_a_change_needs_the_same_origin_and_the_token_of_the_page(changed: dict[str, str]) -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        answer = await client.post("/api/v1/actions/drain", json={"confirm": "order-workers"}, headers=changed)
        del client.headers["Origin"]
        without = await client.post("/api/v1/actions/drain", json={"confirm": "order-workers"})

    assert (answer.status_code, without.status_code) == (403, 403)
    assert pipeline.actions == []


async def test_a_login_from_a_page_elsewhere_is_refused() -> None:
    async with connect(with_accounts()) as client:
        form = {"name": "ann", "password": PASSWORD}
        answer = await client.post("/login", data=form, headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_a_reader_changes_nothing() -> None:
    pipeline = with_accounts()
    async with connect(pipeline) as client:
        await enter(client, name="rob", password=PASSWORD)
        csrf = re.search(r'data-csrf="([^"]+)"', (await client.get("/")).text)
        assert csrf is not None
        answer = await client.post(
            "/api/v1/actions/drain",
            json={"confirm": "order-workers"},
            headers={"Origin": ORIGIN, "X-CSRF-Token": csrf[1]},
        )

    assert answer.status_code == 403
    assert pipeline.actions == []


async def test_a_body_over_a_mebibyte_is_refused_with_and_without_a_length() -> None:
    async def endless() -> Any:
        for _ in range(20):
            yield b"x" * 100_000

    async with log_in(ScriptedPipeline()) as client:
        announced = await client.post("/login", content=b"x" * (guard.MAX_BODY_BYTES + 1))
        streamed = await client.post("/login", content=endless())
        malformed = await client.post("/login", content=b"x", headers={"Content-Length": "-1"})

    assert (announced.status_code, streamed.status_code, malformed.status_code) == (413, 413, 400)


async def test_a_request_that_takes_too_long_is_given_up() -> None:
    app = make_app(ScriptedPipeline())
    app._app._request_seconds = 0.05  # type: ignore[attr-defined]

    async def silent() -> Any:
        yield b"name="
        await asyncio.sleep(60)

    async with connect(ScriptedPipeline(), app) as client:
        answer = await client.post("/login", content=silent(), headers={"Origin": ORIGIN})
        streamed = await client.post("/api/v1/live", content=silent(), headers={"Origin": ORIGIN})
    assert (answer.status_code, streamed.status_code) == (408, 408)


async def test_a_timeout_of_what_answers_is_not_taken_for_that_of_the_request() -> None:
    async def fail(*_: Any) -> None:
        raise TimeoutError("of a database")

    app = make_app(ScriptedPipeline())
    app._app = fail  # type: ignore[attr-defined]
    async with connect(ScriptedPipeline(), app) as client:
        with pytest.raises(TimeoutError, match="of a database"):
            await client.get("/healthz")


async def test_a_filter_by_key_is_not_taken_for_the_key_of_the_address() -> None:
    async with connect(ScriptedPipeline()) as client:
        answer = await client.get("/messages?key=A-17&status=failed")
        login = await client.get(answer.headers["location"])
    assert answer.headers["location"] == "/login?next=%2Fmessages%3Fkey%3DA-17%26status%3Dfailed"
    assert login.status_code == 200


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2f..%2fpyproject.toml", "/static//etc/passwd"]
)
async def test_no_path_leads_out_of_the_static_files(path: str) -> None:
    async with log_in(ScriptedPipeline()) as client:
        answer = await client.get(path)
    assert answer.status_code == 404


async def test_every_answer_forbids_foreign_scripts_frames_and_copies() -> None:
    async with log_in(ScriptedPipeline()) as client:
        answers = [await client.get(path) for path in ("/", "/api/v1/overview", "/nothing", "/static/site.js")]

    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
    assert [answer.headers["cache-control"] for answer in answers[:3]] == ["no-store"] * 3


async def test_behind_a_proxy_links_have_its_path_and_the_cookie_is_for_https() -> None:
    pipeline = ScriptedPipeline({"debug": {"debug_url": "https://ops.example/mill"}})
    async with connect(pipeline) as client:
        client.base_url = httpx.URL("https://ops.example")
        entered = await client.get(f"/mill/login?key={KEY}")
        kept = await client.get("/mill/configuration")
        stripped = await client.get("/configuration")

    assert "Secure" in entered.headers["set-cookie"]
    assert "0;url=/mill/" in entered.text
    assert kept.status_code == stripped.status_code == 200
    assert 'href="/mill/configuration"' in kept.text
    assert 'href="/configuration"' not in kept.text
    assert SECRET not in kept.text


async def test_who_may_only_read_is_not_offered_what_changes_something() -> None:
    async with connect(with_accounts()) as client:
        await enter(client, name="rob", password=PASSWORD)
        reader = await client.get("/")
        await enter(client, name="ann", password=PASSWORD)
        operator = await client.get("/")

    assert '<body class="reader">' in reader.text
    assert "<body>" in operator.text


async def test_head_is_answered_as_get_and_unknown_methods_are_named() -> None:
    async with log_in(ScriptedPipeline()) as client:
        heads = [(await client.head(path)).status_code for path in ("/healthz", "/", "/api/v1/overview", "/none")]
        unknown = await client.request("PURGE", "/")

    assert heads == [200, 200, 200, 404]
    assert (unknown.status_code, unknown.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("messages?statsu=failed", "unknown parameter 'statsu'; did you mean status?"),
        ("overview?x=1", "unknown parameter 'x'; expected one of none"),
        ("messages?partition=1_0", "partition: expected a whole number"),
        ("messages?partition=\u0661\u0662", "partition: expected a whole number"),
    ],
)
async def test_parameters_that_are_not_known_are_refused(address: str, text: str) -> None:
    async with log_in(ScriptedPipeline()) as client:
        answer = await client.get(f"/api/v1/{address}")

    assert answer.status_code == 422
    assert text in answer.json()["detail"]
