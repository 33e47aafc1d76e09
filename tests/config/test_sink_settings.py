"""The sections of the sinks: defaults, what is refused, and what is shown of secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.config.loading import load_settings
from tidemill.config.redaction import find_url_secrets, mask_secrets, redact
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError


def load(sinks: dict[str, Any]) -> Settings:
    return load_settings(None, {}, {"sinks": sinks})


def test_defaults_are_those_of_the_reference() -> None:
    sinks = load(
        {
            "postgres": {"a": {"dsn": "postgresql://h/d"}},
            "mongo": {"a": {"uri": "mongodb+srv://h", "database": "d"}},
            "http": {"a": {"url": "https://h/"}},
            "redis": {"a": {}},
        }
    ).sinks
    assert sinks.postgres["a"].model_dump() == {
        "ui_url": "",
        "dsn": "postgresql://h/d",
        "pool_min": 2,
        "pool_max": 10,
        "statements": {},
    }
    assert sinks.http["a"].model_dump() == {
        "ui_url": "",
        "url": "https://h/",
        "method": "POST",
        "timeout_seconds": 30.0,
        "headers": {},
        "max_retries": 3,
        "concurrency": 1,
        "idempotency_header": "Idempotency-Key",
    }
    assert sinks.redis["a"].model_dump() == {
        "ui_url": "",
        "url": "redis://localhost:6379/0",
        "key_prefix": "",
        "scripts": {},
    }
    assert list(sinks.group_by_type()) == ["http", "mongo", "postgres", "redis"]
    assert not sinks.is_empty()


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"postgres": {"a": {}}}, r"sinks\.postgres\.a\.dsn: is required"),
        ({"postgres": {"a": {"dsn": "host=h password=hunter2"}}}, r"a\.dsn: must begin with postgresql://"),
        ({"postgres": {"a": {"dsn": "postgresql://u:hunter2@h:port/d"}}}, r"a\.dsn: is not a valid address"),
        ({"postgres": {"a": {"dsn": "postgresql://h/d", "pool_min": 11}}}, r"pool_min \(11\) must not exceed pool_max"),
        ({"postgres": {"a": {"dsn": "postgresql://h/d", "pool": 1}}}, "unknown key; did you mean pool_m"),
        ({"mongo": {"a": {"uri": "mongo://u:hunter2@h", "database": "d"}}}, r"a\.uri: must begin with mongodb://"),
        ({"mongo": {"a": {"uri": "mongodb://h", "database": "a b"}}}, "is not a valid database name"),
        ({"http": {"a": {"url": "ftp://u:hunter2@h/"}}}, r"a\.url: must begin with http:// or https://"),
        ({"http": {"a": {"url": "https:///path"}}}, r"a\.url: has no host"),
        ({"http": {"a": {"url": "https://h/", "method": "GET"}}}, r"a\.method: expected 'POST', 'PUT' or 'PATCH'"),
        ({"http": {"a": {"url": "https://h/", "headers": {"a b": "hunter2"}}}}, "'a b' is not a valid header name"),
        ({"http": {"a": {"url": "https://h/", "headers": {"Host": "x"}}}}, "Host cannot be set here"),
        (
            {"http": {"a": {"url": "https://h/", "headers": {"A": "hunter2\r\nB: x"}}}},
            "the value of A contains invalid characters",
        ),
        ({"http": {"a": {"url": "https://h/", "idempotency_header": "Host"}}}, "cannot be used as a header name"),
        ({"http": {"a": {"url": "https://h/", "concurrency": 0}}}, r"a\.concurrency: expected a number above 0"),
        ({"redis": {"a": {"url": "http://h"}}}, r"a\.url: must begin with redis://"),
        ({"custom": {"redis": {"a": {}}}}, r"move it to sinks\.redis"),
        ({"custom": {"s3": {"a": {"ui_url": 5}}}}, r"s3\.a\.ui_url: expected a string"),
        ({"custom": {"s3": "x"}}, r"sinks\.custom\.s3: expected a mapping"),
    ],
)
def test_what_is_wrong_is_told_by_its_place_and_without_its_secrets(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(section)
    assert "hunter2" not in str(caught.value)


def test_the_environment_reaches_every_sink() -> None:
    environ = {
        "TIDEMILL_SINKS__POSTGRES__MAIN__DSN": "postgresql://h/d",
        "TIDEMILL_SINKS__HTTP__API__URL": "https://h/",
        "TIDEMILL_SINKS__HTTP__API__CONCURRENCY": "8",
    }
    sinks = load_settings(None, environ).sinks
    assert sinks.postgres["main"].dsn == "postgresql://h/d"
    assert sinks.http["api"].concurrency == 8


def test_what_is_shown_of_a_configuration_has_no_secret_of_any_sink(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.yaml"
    path.write_text(
        """
sinks:
  postgres: {a: {dsn: "postgresql://app:hunter2@h/d", ui_url: "http://look"}}
  mongo: {a: {uri: "mongodb://app:hunter2@h/?tlsCertificateKeyFilePassword=hunter2", database: d}}
  http: {a: {url: "https://h/?token=hunter2", headers: {Authorization: "Bearer hunter2", X-Whatever: hunter2,
                                                        Accept: text/plain}}}
  redis: {a: {url: "redis://:hunter2@h/0"}}
  custom: {s3: {a: {secret_key: hunter2, address: "s3://me:hunter2@h", bucket: b}}}
"""
    )
    done = CliRunner().invoke(app, ["config", "show", str(path)])
    assert done.exit_code == 0, done.output
    assert "hunter2" not in done.output
    for shown in ("postgresql://***@h/d", "http://look", "text/plain", "bucket: b"):
        assert shown in done.output


def test_an_object_of_settings_shows_no_secret_and_still_has_it() -> None:
    headers = {"X-Whatever": "hunter2", "Accept": "text/plain"}
    settings = Settings.model_validate(
        {
            "kafka": {"client_config": {"sasl.password": "hunter2"}},
            "store": {"url": "postgresql://app:hunter2@h/d"},
            "sinks": {
                "http": {"a": {"url": "https://h/?token=hunter2", "headers": headers}},
                "custom": {"s3": {"a": {"secret_key": "hunter2", "bucket": "b"}}},
            },
        }
    )
    for shown in (repr(settings), str(settings), f"{settings.sinks.http}", repr(settings.kafka)):
        assert "hunter2" not in shown
        assert "***" in shown
    assert "text/plain" in repr(settings.sinks)
    assert settings.kafka.client_config["sasl.password"] == "hunter2"
    assert settings.model_dump()["sinks"]["http"]["a"]["headers"] == headers


def test_passwords_of_addresses_are_known_in_each_of_their_forms() -> None:
    assert find_url_secrets("postgresql://u:p%40ss@h/d?password=q&x=1") == {"p%40ss", "p@ss", "q"}
    assert find_url_secrets("redis://h") == frozenset()
    assert find_url_secrets("http://[") == frozenset()
    assert mask_secrets("a p@ss and token=b", {"p@ss"}) == "a *** and token=***"
    assert redact({"headers": {"X-Any": "s", "Accept": "a"}}) == {"headers": {"X-Any": "***", "Accept": "a"}}


@pytest.mark.parametrize("value", [" Bearer x", "Bearer x\t", "a\r\nb", "\0"])
def test_a_header_that_no_request_could_have_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="the value of X-Any contains invalid characters"):
        load({"http": {"a": {"url": "https://h/", "headers": {"X-Any": value}}}})


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ({"s": {"sql": "COMMIT"}}, "must be one statement that begins with INSERT"),
        ({"s": {"sql": "DROP TABLE t"}}, "must be one statement"),
        ({"s": {"sql": "selection"}}, "must be one statement"),
        ({"s": {"sql": ""}}, "sql"),
        ({"s": {"sql": "SELECT f($1)", "parameters": ["a b"]}}, "'a b' is not a usable name"),
        ({"s": {"sql": "SELECT f($1)", "parameters": ["a", "a"]}}, "has duplicate names"),
        ({"s": {"sql": "SELECT f($1)", "parameters": ["a"], "key": ["b"]}}, "key names b, which is not in parameters"),
        ({"s; --": {"sql": "SELECT f()"}}, "'s; --' is not a usable name"),
        ({"s": {"sql": "SELECT f()", "params": []}}, "params"),
    ],
)
def test_a_statement_that_cannot_be_one_is_refused(statement: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load({"postgres": {"a": {"dsn": "postgresql://h/d", "statements": statement}}})


def test_a_statement_says_what_its_parameters_are_called() -> None:
    statement = {"sql": " with x as (select $1) select f($2)", "parameters": ["a", "b"], "key": ["b"]}
    found = load({"postgres": {"a": {"dsn": "postgresql://h/d", "statements": {"s": statement}}}}).sinks.postgres["a"]
    assert found.statements["s"].model_dump() == statement
