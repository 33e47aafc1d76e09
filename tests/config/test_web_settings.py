"""Who may use the web UI, as it is configured."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.config.loading import load_settings
from tidemill.config.redaction import redact
from tidemill.core.errors import ConfigError
from tidemill.web.access.hashes import hash_password, hash_token

USERS = {"ann": {"hash": hash_password("correct horse"), "role": "operate"}}
TOKENS = {"bot": {"hash": hash_token("a token")}}


def load(**debug: Any) -> Any:
    return load_settings(None, {}, {"debug": {"enabled": True, **debug}}).debug


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "web.example"])
def test_an_address_that_others_reach_needs_users_or_tokens(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host {host} may be reached from other machines, so the web UI needs"):
        load(host=host)
    assert load(host=host, users=USERS).users["ann"].role == "operate"
    assert load(host=host, tokens=TOKENS).tokens["bot"].role == "read"
    assert load(host=host, enabled=False).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.53", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert load(host=host).host == host


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"users": {"ann": {"hash": "correct horse"}}}, "debug.users.ann.hash: .*tidemill config hash"),
        ({"tokens": {"bot": {"hash": "a token"}}}, "debug.tokens.bot.hash: .*tidemill config hash --token"),
        ({"users": {"ann": {**USERS["ann"], "role": "admin"}}}, "debug.users.ann.role"),
        ({"debug_url": "javascript:alert(1)"}, "debug.debug_url: .*http:// or https://"),
        ({"debug_url": "ftp://example.org"}, "debug.debug_url: .*http:// or https://"),
        ({"custom_links": [{"name": "x", "url": "javascript:alert(1)"}]}, "custom_links.*http:// or https://"),
        ({"custom_links": [{"name": "x", "url": "https://a:correct horse@b.example"}]}, "without user and password"),
        ({"custom_links": [{"name": "", "url": "https://x.example"}]}, "custom_links"),
        ({"prometheus_url": "javascript:alert(1)"}, "debug.prometheus_url: .*http:// or https://"),
        ({"prometheus_url": "//prom.example"}, "debug.prometheus_url: .*http:// or https://"),
        ({"prometheus_rate_interval": "5"}, "debug.prometheus_rate_interval: .*for example 5m"),
        ({"prometheus_rate_interval": ""}, "debug.prometheus_rate_interval: .*for example 5m"),
        ({"prometheus_rate_interval": "5m])) or vector(1"}, "debug.prometheus_rate_interval: .*for example 5m"),
        ({"prometheus_worker_label": "pod name"}, "debug.prometheus_worker_label: .*letters, digits"),
        ({"prometheus_cluster_label": "1st"}, "debug.prometheus_cluster_label: .*letters, digits"),
        ({"peers": [{"url": "ftp://b.example", "token": "t"}]}, "peers.*http:// or https://"),
        ({"peers": [{"url": "https://me:pw@b.example", "token": "t"}]}, "peers.*without user and password"),
        ({"peers": [{"url": "https://b.example"}]}, "peers.*token"),
        ({"peers": [{"url": "https://b.example", "token": "a\r\nHost: c"}]}, "peers.*config hash --token"),
        ({"port": 70000}, "debug.port"),
    ],
)
def test_what_is_wrong_is_named_without_repeating_it(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(**wrong)
    assert "correct horse" not in str(caught.value)


def test_hashes_are_masked_and_names_are_shown() -> None:
    shown = redact(load(users=USERS, tokens=TOKENS).model_dump())

    assert shown["users"] == {"ann": {"hash": "***", "role": "operate"}}
    assert shown["tokens"] == {"bot": {"hash": "***", "role": "read"}}
    assert redact({"tokens": {"a": "b"}}) == {"tokens": "***"}
    assert redact({"tokens": {}}) == {"tokens": {}}
