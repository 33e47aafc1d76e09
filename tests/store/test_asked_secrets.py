from __future__ import annotations

from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.task_calls import ConnectionRecord, GetConnection, GetVariable, SetVariable


def test_passwords_of_connections_and_secret_variables_are_found() -> None:
    extra = '{"region": "north", "deep": [{"secret_key": "abcdef"}], "token": "xyz1"}'
    record = ConnectionRecord("db", "postgres", password="s3cr3t", extra=extra)
    assert find_secrets(GetConnection("db"), record) == {"s3cr3t", "abcdef", "xyz1"}
    assert find_secrets(GetVariable("db_password"), "s3cr3t") == {"s3cr3t"}
    assert find_secrets(GetVariable("db"), "postgresql://me:hunter2@host/db") == {"hunter2"}


def test_what_is_not_secret_is_shown() -> None:
    assert find_secrets(GetVariable("region"), "north") == set()
    assert find_secrets(GetVariable("password"), None) == set()
    assert find_secrets(GetConnection("db"), ConnectionRecord("db", "http", extra="{not json")) == set()


def test_secrets_inside_documents_and_addresses_are_found() -> None:
    given = '{"host": "h", "password": "pa55", "servers": ["http://me:hunter2@h"], "pin": 1234567, "port": 5432}'
    assert find_secrets(GetVariable("shop"), given) == {"pa55", "hunter2"}
    # The name says that all of it is secret; numbers of a few digits would be found everywhere.
    assert find_secrets(GetVariable("db_secrets"), '{"a": ["b0b0"], "n": 7654321, "port": 5432}') == {
        '{"a": ["b0b0"], "n": 7654321, "port": 5432}',
        "b0b0",
        "7654321",
    }
    record = ConnectionRecord("db", "http", host="https://u:in-host@h", extra='{"proxy": "http://u:in-proxy@p"}')
    assert find_secrets(GetConnection("db"), record) == {"in-host", "in-proxy"}
    inner = ConnectionRecord("gcp", "google", extra='{"keyfile_dict": "{\\"private_key\\": \\"k3y-of-it\\"}"}')
    assert find_secrets(GetConnection("gcp"), inner) == {"k3y-of-it"}


def test_what_a_task_stores_as_a_secret_is_one() -> None:
    assert find_secrets(SetVariable("api_token", "abc123")) == {"abc123"}
    assert find_secrets(SetVariable("region", "north")) == set()
