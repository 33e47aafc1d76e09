"""Redaction: what counts as a secret, by its key and by its form."""

from __future__ import annotations

import time

import pytest

from tidemill.config.redaction import MASK, is_secret, redact, redact_arguments, redact_text
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.pipeline.recording.texts import clean_args


@pytest.mark.parametrize(
    "key",
    [
        "sasl.password",
        "sasl.username",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.client.secret",
        "sasl.jaas.config",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.keystore.password",
        "DB_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "API_KEY",
        "apikey",
        "passphrase",
        "X_AUTH",
        "credentials",
        "Authorization",
        "spark.hadoop.fs.s3a.access.key",
        "spark.ssl.keyPassword",
    ],
)
def test_these_keys_hold_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "sasl.mechanism",
        "sasl.mechanisms",
        "security.protocol",
        "ssl.ca.location",
        "ssl.key.location",
        "ssl.keystore.location",
        "brokers",
        "topic",
        "key",
        "keys",
        "env_inherit_deny",
        "worker_name_env",
        "sasl.oauthbearer.token.endpoint.url",
    ],
)
def test_these_keys_are_shown(key: str) -> None:
    assert not is_secret(key)


def test_a_mapping_is_masked_to_its_bottom_and_not_changed_itself() -> None:
    original = {
        "kafka": {"client_config": {"sasl.password": "hunter2", "sasl.mechanism": "PLAIN"}},
        "list": [{"token": "hunter2"}, "postgres://app:hunter2@db/x"],
        "tuple": ("http://hunter2@host/",),
        "credentials": {"user": "hunter2"},
        "number": 5,
        "body": b"raw",
    }

    masked = redact(original)

    assert "hunter2" not in str(masked)
    assert masked["kafka"]["client_config"] == {"sasl.password": MASK, "sasl.mechanism": "PLAIN"}
    assert masked["list"] == [{"token": MASK}, f"postgres://{MASK}@db/x"]
    assert masked["credentials"] == MASK
    assert (masked["number"], masked["body"]) == (5, b"raw")
    assert original["kafka"]["client_config"]["sasl.password"] == "hunter2"  # type: ignore[index]


def test_an_empty_secret_is_seen_to_be_empty() -> None:
    assert redact({"password": "", "token": None}) == {"password": "", "token": None}


@pytest.mark.parametrize(
    "text",
    [
        "postgres://app:hunter2@db:5432/x?sslmode=require",
        "amqp://u:hunter2@x@host/",
        "https://hunter2@host/path",
        "host=db password=hunter2 user=app",
        "password: 'hunter2 and more'",
        '{"sasl.password": "hunter2", "x": 1}',
        '{"sasl.password": "a\\"hunter2"}',
        "{'client_secret': 'hunter2'}",
        "http://host/?token=hunter2&x=1",
        "Authorization: Bearer hunter2hunter2",
        "curl -H 'Authorization: Basic hunter2hunter2=='",
        "SASL_PASSWORD=hunter2",
        "bad value for sasl.password=hunter2, sorry",
        "failed: psql --password hunter2 -h db",
        "sh -c 'prog --db-token \"hunter2 and more\"'",
        "curl -u ann:hunter2 http://host/",
        "curl --proxy-user=ann:hunter2 http://host/",
        "curl -u 'ann:hunter2' http://host/",
        "https://account.blob.example/x?sv=1&sig=hunter2%2B&se=2",
        "https://s3.example/x?X-Amz-Signature=hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2 is cut",
        "charged with sk_live_hunter2hunter2",
        "pushed with ghp_hunter2hunter2hunter2hunter2",
        "token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.hunter2",
    ],
)
def test_secrets_inside_a_text_are_masked(text: str) -> None:
    masked = redact_text(text)

    assert "hunter2" not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "text",
    [
        "task timed out",
        "topic orders/3 at offset 12: not valid JSON",
        "me@example.org wrote",
        "http://host:80/path?x=1",
        "ratio 1:2, key=5, user@host:dir",
        "ls -u 1000 --user-agent x:y --tokens",
        "sort -u a b; docker run -it x",
        "expected a-b -c d; --no-password -v",
        'InvalidPasswordError: password authentication failed for user "app"',
        "",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redact_text(text) == text


def test_long_texts_do_not_take_long() -> None:
    texts = ["a" * 200_000 + "=", "password" * 20_000 + " =x", "x://" * 50_000, "a.b@c " * 30_000 + "="]
    texts += [":" + "token" * 20_000, "@" + "a.a." * 50_000, "token" + " " * 50_000 + "token"]
    texts += ["-" * 200_000, "--token" * 30_000, "-u " * 70_000, "-u a" + "b" * 200_000, "?a-" * 70_000 + "="]
    texts += ["-----BEGIN PRIVATE KEY-----" * 8_000, "sk-live-" * 25_000, "eyJ" + "a." * 100_000, "-u a:" * 40_000]

    started = time.process_time()
    for text in texts:
        redact_text(text)

    assert time.process_time() - started < 2.0


def test_the_value_of_an_option_is_masked_where_a_letter_shows_arguments() -> None:
    letter = Letter.about([], LetterKind.TASK, "failed", args=["psql", "--password", "hunter2", "--token", "-v", "3"])
    assert letter.args == ["psql", "--password", MASK, "--token", "-v", "3"]


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        (["curl", "-u", "ann:hunter2"], ["curl", "-u", MASK]),
        (["docker", "-u", "1000"], ["docker", "-u", "1000"]),
        (["prog", "--password", "-v"], ["prog", "--password", "-v"]),
        (["sh", "-c", "prog --password hunter2"], ["sh", "-c", f"prog --password {MASK}"]),
    ],
)
def test_the_value_of_an_option_is_masked(arguments: list[str], masked: list[str]) -> None:
    assert redact_arguments(arguments) == masked
    assert clean_args(arguments) == masked
