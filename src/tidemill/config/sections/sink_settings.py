"""The settings of each type of sink, and the checks before anything connects.

Every sink has a `ui_url`. URLs may contain passwords: they are masked wherever configuration is shown, and no message
here quotes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tidemill.config.kafka_names import check_brokers, check_topic, refuse_owned
from tidemill.config.sections.section import NonEmpty, Section, to_upper

#: The librdkafka keys that tidemill sets itself, each with an alternative.
OWNED_SINK_KEYS: Mapping[str, str] = {
    "bootstrap.servers": "set brokers of this sink",
    "metadata.broker.list": "set brokers of this sink",
}
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\uffff]*")
#: The client sets these from the request itself.
_OWNED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_IDENTIFIER = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,62}")
#: The statements that a configuration may contain: none that ends the surrounding transaction.
_SQL = re.compile(r"\s*(insert|update|delete|merge|with|select)\b", re.IGNORECASE)
_DATABASE_REFUSED = re.compile(r'[/\\. "$\x00]')


def _check_client_config(value: dict[str, Any]) -> dict[str, Any]:
    return refuse_owned(value, OWNED_SINK_KEYS)


def _check_address(value: str, schemes: tuple[str, ...], example: str) -> str:
    """Check the form of a URL without quoting it, since it may contain a password."""
    try:
        parts = urlsplit(value)
        _ = parts.port if "," not in parts.netloc else None
    except ValueError:
        raise ValueError(f"is not a valid address; expected something like {example}") from None
    if parts.scheme not in schemes:
        raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}, like {example}")
    return value


def _check_postgres_dsn(value: str) -> str:
    return _check_address(value, ("postgresql", "postgres"), "postgresql://user:password@host:5432/database")


def _check_mongo_uri(value: str) -> str:
    return _check_address(value, ("mongodb", "mongodb+srv"), "mongodb://user:password@host:27017")


def _check_mongo_database(value: str) -> str:
    if _DATABASE_REFUSED.search(value) or len(value.encode()) > 63:
        raise ValueError('is not a valid database name: 1 to 63 bytes without / \\ . " $ and spaces are allowed')
    return value


def _check_http_url(value: str) -> str:
    _check_address(value, ("http", "https"), "https://host/path")
    if not urlsplit(value).hostname:
        raise ValueError("has no host; expected something like https://host/path")
    return value


def _check_utf8(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cannot be encoded as UTF-8: {error.reason}") from None
    return value


def _check_redis_url(value: str) -> str:
    return _check_address(value, ("redis", "rediss", "unix"), "redis://host:6379/0")


def _check_headers(value: dict[str, str]) -> dict[str, str]:
    for name, content in value.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid header name")
        if name.lower() in _OWNED_HEADERS:
            raise ValueError(f"{name} cannot be set here: the client sets it")
        if not _HEADER_VALUE.fullmatch(content) or content != content.strip(" \t"):
            raise ValueError(f"the value of {name} contains invalid characters, or a space at its start or end")
    return value


def _check_header_name(value: str) -> str:
    if not _HEADER_NAME.fullmatch(value) or value.lower() in _OWNED_HEADERS:
        raise ValueError(f"{value!r} cannot be used as a header name")
    return value


class SinkSection(Section):
    """The settings that all sinks have."""

    ui_url: str = Field("", description="A URL where users can see the written data.")


class KafkaSinkSettings(SinkSection):
    """A Kafka topic to write to."""

    topic: Annotated[str, AfterValidator(check_topic)] = Field(description="The topic to write to; it must exist.")
    brokers: Annotated[str, AfterValidator(check_brokers)] = Field(
        "", description="'' inherits kafka.brokers and its security settings."
    )
    client_config: Annotated[dict[str, Any], AfterValidator(_check_client_config)] = Field(
        default_factory=dict, description="Properties passed to librdkafka."
    )


class FilesystemSinkSettings(SinkSection):
    """A folder for JSON lines files."""

    base_path: NonEmpty = Field(
        description="The folder, relative to the driver's directory; on a cluster, all hosts must share it."
    )
    fsync: bool = Field(False, description="Whether to wait until written data is on disk.")


def _check_sql(value: str) -> str:
    if not _SQL.match(value) or "\0" in value:
        raise ValueError("must be one statement that begins with INSERT, UPDATE, DELETE, MERGE, WITH or SELECT")
    return value


def _check_identifiers(value: list[str]) -> list[str]:
    for name in value:
        if not _IDENTIFIER.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a usable name: letters, digits and _ are allowed, and the first may not be a digit"
            )
    if len(set(value)) < len(value):
        raise ValueError("has duplicate names")
    return value


class PostgresStatementSettings(Section):
    """A statement that payloads can refer to by name."""

    sql: Annotated[NonEmpty, AfterValidator(_check_sql)] = Field(
        description="One INSERT, UPDATE, DELETE, MERGE, WITH or SELECT statement, with $1, $2, ... for its parameters."
    )
    parameters: Annotated[list[str], AfterValidator(_check_identifiers)] = Field(
        default_factory=list, description="The names of $1, $2, ... in a payload's data."
    )
    key: Annotated[list[str], AfterValidator(_check_identifiers)] = Field(
        default_factory=list,
        description="The parameters that identify the row; payloads with equal values stay in order.",
    )

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if missing := [name for name in self.key if name not in self.parameters]:
            raise ValueError(f"key names {', '.join(missing)}, which is not in parameters")
        return self


def _check_statements(value: dict[str, PostgresStatementSettings]) -> dict[str, PostgresStatementSettings]:
    _check_identifiers(list(value))
    return value


class PostgresSinkSettings(SinkSection):
    """A PostgreSQL database."""

    dsn: Annotated[NonEmpty, AfterValidator(_check_postgres_dsn)] = Field(
        description="postgresql://user:password@host:port/database."
    )
    pool_min: NonNegativeInt = Field(2, description="The number of connections that each engine keeps open.")
    pool_max: PositiveInt = Field(
        10, description="The maximum number of connections of each engine; the server sees engines x pool_max."
    )
    statements: Annotated[dict[str, PostgresStatementSettings], AfterValidator(_check_statements)] = Field(
        default_factory=dict, description="Statements that payloads can name."
    )

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.pool_min > self.pool_max:
            raise ValueError(f"pool_min ({self.pool_min}) must not exceed pool_max ({self.pool_max})")
        return self


class MongoSinkSettings(SinkSection):
    """A MongoDB database."""

    uri: Annotated[NonEmpty, AfterValidator(_check_mongo_uri)] = Field(description="mongodb://user:password@host:port.")
    database: Annotated[NonEmpty, AfterValidator(_check_mongo_database)] = Field(
        description="The database to write to."
    )


class HttpSinkSettings(SinkSection):
    """An HTTP endpoint that gets one request per payload."""

    url: Annotated[NonEmpty, AfterValidator(_check_http_url)] = Field(
        description="The target of the requests; the paths of payloads are relative to it."
    )
    method: Annotated[Literal["POST", "PUT", "PATCH"], BeforeValidator(to_upper)] = Field(
        "POST", description="The method of payloads that do not set one."
    )
    timeout_seconds: PositiveFloat = Field(
        30.0, description="A request that is not answered within this time has failed."
    )
    headers: Annotated[dict[str, str], AfterValidator(_check_headers)] = Field(
        default_factory=dict, description="Headers sent with every request; shown masked."
    )
    max_retries: NonNegativeInt = Field(
        3, description="The number of retries of a request before the sink as a whole backs off."
    )
    concurrency: PositiveInt = Field(
        1, description="The number of concurrent requests; above 1, payloads are not delivered in order."
    )
    idempotency_header: Annotated[str, AfterValidator(_check_header_name)] = Field(
        "Idempotency-Key",
        description="The header that carries a payload's idempotency key, which is the same in all requests of the "
        "payload.",
    )


class RedisSinkSettings(SinkSection):
    """A Redis database."""

    url: Annotated[NonEmpty, AfterValidator(_check_redis_url)] = Field(
        "redis://localhost:6379/0",
        description="A redis://, rediss:// or unix:// URL; it may contain a user and a password.",
    )
    key_prefix: Annotated[str, AfterValidator(_check_utf8)] = Field("", description="A prefix for every key.")
    scripts: dict[NonEmpty, Annotated[NonEmpty, AfterValidator(_check_utf8)]] = Field(
        default_factory=dict, description="Lua scripts by name, for payloads with `op: script`."
    )
