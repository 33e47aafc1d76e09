"""The calls of people about pools, variables and connections.

Invariants: a list is answered in pages by key; a list of connections has no secrets.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed


class PoolRecord(msgspec.Struct, frozen=True):
    """A pool. `used`: slots that are held; `waiting`: tasks that wait for some."""

    name: str
    slots: int
    description: str
    include_deferred: bool
    used: int
    waiting: int


class ListPools(Call[tuple[PoolRecord, ...]], frozen=True):
    """Answer all pools by name."""


class SetPool(Call[None], frozen=True):
    """Create a pool, or change it.

    Attributes:
        name: Its name.
        slots: How many slots it has.
        description: What it is for; None: as it was, or empty if it is new.
        include_deferred: Whether deferred tasks keep their slots; None: as it was, or no if it is new.
    """

    name: str
    slots: int
    description: str | None = None
    include_deferred: bool | None = None


class DeletePool(Call[bool], frozen=True):
    """Delete a pool; False: there was none. The default pool, and one that tasks wait for, is refused."""

    name: str


class VariableRecord(msgspec.Struct, frozen=True):
    """A variable. `value`: None where the call did not ask for values."""

    key: str
    value: str | None
    description: str
    changed_us: int


class ListVariables(Call[Listed[VariableRecord]], frozen=True):
    """Answer variables by key."""

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


class ListConnections(Call[Listed[ConnectionRow]], frozen=True):
    """Answer connections by id, without password and extra."""

    after: str | None = None
    limit: int = PAGE


class SetConnection(Call[None], frozen=True):
    """Store a connection; the fields are those of `task_calls.ConnectionRecord`."""

    id: str
    kind: str
    host: str | None = None
    schema: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    extra: str | None = None
    description: str | None = None


class DeleteConnection(Call[bool], frozen=True):
    """Delete a connection; False: there was none."""

    id: str
