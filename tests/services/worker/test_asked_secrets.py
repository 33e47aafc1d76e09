from __future__ import annotations

from tidemill.services.worker.asked_secrets import find_secrets
from tidemill.store.calls import ConnectionRecord, GetConnection, GetVariable


def test_passwords_of_connections_and_secret_variables_are_found() -> None:
    extra = '{"region": "north", "deep": [{"secret_key": "abcdef"}], "token": "xyz1"}'
    record = ConnectionRecord("db", "postgres", password="s3cr3t", extra=extra)
    assert find_secrets(GetConnection("db"), record) == {"s3cr3t", "abcdef", "xyz1"}
    assert find_secrets(GetVariable("db_password"), "s3cr3t") == {"s3cr3t"}
    assert find_secrets(GetVariable("db"), "postgresql://me:hunter2@host/db") == {"hunter2"}


def test_what_is_not_secret_or_too_short_to_be_told_apart_is_shown() -> None:
    assert find_secrets(GetVariable("region"), "north") == set()
    assert find_secrets(GetVariable("password"), "abc") == set()
    assert find_secrets(GetVariable("password"), None) == set()
    assert find_secrets(GetConnection("db"), ConnectionRecord("db", "http", extra="{not json")) == set()
