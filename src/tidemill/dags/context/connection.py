"""Connections: the address of a service and the credentials for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from tidemill.dags.attempt.current import find_shared_values
from tidemill.dags.exceptions import NotFoundError


@dataclass
class Connection:
    """The address of a service and the credentials for it.

    Attributes:
        conn_id: The id of the connection.
        conn_type: The type of the service, such as `postgres`.
        description: A description for people.
        host: The host name or IP address.
        login: The user name.
        password: The password.
        schema: The database, or the service's equivalent of one.
        port: The port.
        extra: More settings, as the text of a JSON object.
    """

    conn_id: str
    conn_type: str = ""
    description: str | None = None
    host: str | None = None
    login: str | None = None
    password: str | None = None
    schema: str | None = None
    port: int | None = None
    extra: str | None = None

    @classmethod
    def get(cls, conn_id: str) -> Connection:
        """Return the connection with this id from the store.

        Raises:
            NotFoundError: The connection does not exist.
        """
        text = find_shared_values(f"connection {conn_id!r}").get_connection(conn_id)
        if text is None:
            raise NotFoundError(
                f"connection {conn_id!r} does not exist; set it with `tidemill connections set {conn_id}`"
            )
        return cls.from_json(conn_id, text)

    @classmethod
    def from_json(cls, conn_id: str, text: str) -> Connection:
        """Return a connection from a JSON object of its fields; unknown fields are ignored."""
        known = {field.name for field in fields(cls)}
        found = {name: value for name, value in json.loads(text).items() if name in known and value is not None}
        if isinstance(found.get("extra"), dict):
            found["extra"] = json.dumps(found["extra"])
        return cls(**{**found, "conn_id": conn_id})

    @classmethod
    def from_uri(cls, conn_id: str, uri: str) -> Connection:
        """Return a connection from a URI: `type://login:password@host:port/schema?extra=value`."""
        parts = urlsplit(uri)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return cls(
            conn_id,
            conn_type=parts.scheme.replace("-", "_"),
            host=unquote(parts.hostname) if parts.hostname else None,
            login=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            schema=unquote(parts.path[1:]) or None,
            port=parts.port,
            extra=json.dumps(query) if query else None,
        )

    @property
    def extra_dejson(self) -> dict[str, Any]:
        """The fields of `extra`; empty if `extra` is not a JSON object."""
        try:
            found = json.loads(self.extra or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def get_uri(self) -> str:
        """Return the connection as a URI: `type://login:password@host:port/schema?extra=value`."""
        user = quote(self.login, safe="") if self.login else ""
        if self.password:
            user += f":{quote(self.password, safe='')}"
        host = quote(self.host, safe="") if self.host else ""
        netloc = f"{user}@{host}" if user else host
        if self.port:
            netloc += f":{self.port}"
        extra = self.extra_dejson
        query = f"?{urlencode(extra)}" if extra else ""
        schema = f"/{quote(self.schema, safe='')}" if self.schema else ""
        return f"{self.conn_type.replace('_', '-')}://{netloc}{schema}{query}"

    def to_json(self) -> str:
        """Return all fields as JSON, including the password."""
        return json.dumps(asdict(self))

    def __repr__(self) -> str:
        return f"<Connection {self.conn_id!r} {self.conn_type}>"


class ConnectionAccessor:
    """Access to connections in templates: `conn.name.host`, `conn.get('name')`."""

    def __getattr__(self, conn_id: str) -> Connection:
        if conn_id.startswith("__"):
            raise AttributeError(conn_id)
        return Connection.get(conn_id)

    def get(self, conn_id: str, default: Any = None) -> Any:
        """Return a connection, or `default` if it does not exist."""
        try:
            return Connection.get(conn_id)
        except NotFoundError:
            return default


class BaseHook:
    """Base of hooks: classes that talk to a service over a connection."""

    @classmethod
    def get_connection(cls, conn_id: str) -> Connection:
        """Return the connection with this id; see `Connection.get`."""
        return Connection.get(conn_id)
