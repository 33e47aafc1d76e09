"""The calls of the command line and the web pages about pools, variables and connections.

Invariants: lists are returned in keyset pages; a list of connections contains no secrets.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by


class PoolRecord(msgspec.Struct, frozen=True):
    """A pool. `used`: slots in use; `waiting`: tasks that wait for slots."""

    name: str
    slots: int
    description: str
    include_deferred: bool
    used: int
    waiting: int


@answered_by("dags.admin.pools:list_pools", reads=True)
class ListPools(Call[tuple[PoolRecord, ...]], frozen=True):
    """Return all pools by name."""


@answered_by("dags.admin.pools:set_pool")
class SetPool(Call[None], frozen=True):
    """Create or change a pool.

    Attributes:
        name: Its name.
        slots: Its number of slots.
        description: Its purpose; None: unchanged, or empty for a new pool.
        include_deferred: Whether deferred tasks keep their slots; None: unchanged, or False for a new pool.
    """

    name: str
    slots: int
    description: str | None = None
    include_deferred: bool | None = None


@answered_by("dags.admin.pools:delete_pool")
class DeletePool(Call[bool], frozen=True):
    """Delete a pool; False if there was none. Deleting the default pool, or a pool with waiting tasks, is refused."""

    name: str


class VariableRecord(msgspec.Struct, frozen=True):
    """A variable. `value`: None if the call did not ask for values."""

    key: str
    value: str | None
    description: str
    changed_us: int


@answered_by("dags.values.task_values:list_variables", reads=True)
class ListVariables(Call[Listed[VariableRecord]], frozen=True):
    """Return variables by key."""

    after: str | None = None
    limit: int = PAGE
    values: bool = False


class ConnectionRow(msgspec.Struct, frozen=True):
    """A connection without its secrets."""

    id: str
    kind: str
    host: str | None
    port: int | None
    schema: str | None
    login: str | None
    description: str | None


@answered_by("dags.values.task_values:list_connections", reads=True)
class ListConnections(Call[Listed[ConnectionRow]], frozen=True):
    """Return connections by id, without password and extra."""

    after: str | None = None
    limit: int = PAGE


@answered_by("dags.values.task_values:set_connection")
class SetConnection(Call[None], frozen=True):
    """Store a connection; `task_calls.ConnectionRecord` explains the fields."""

    id: str
    kind: str
    host: str | None = None
    schema: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    extra: str | None = None
    description: str | None = None


@answered_by("dags.values.task_values:delete_connection")
class DeleteConnection(Call[bool], frozen=True):
    """Delete a connection; False if there was none."""

    id: str
