"""The errors that tidemill raises, for `except` clauses.

`TidemillError` is the base of all others.
"""

from tidemill.core.errors import (
    AmbiguousSinkError,
    ConfigError,
    HandlerError,
    InvariantError,
    RemoteError,
    SinkNotConfiguredError,
    TidemillError,
    TooManyFailuresError,
    UserActionError,
)

__all__ = [
    "AmbiguousSinkError",
    "ConfigError",
    "HandlerError",
    "InvariantError",
    "RemoteError",
    "SinkNotConfiguredError",
    "TidemillError",
    "TooManyFailuresError",
    "UserActionError",
]
