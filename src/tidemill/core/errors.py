"""The errors that users of tidemill can see, split by who is to blame.

Every message says what happened, to what, and what to do about it.
"""

from __future__ import annotations


class TidemillError(Exception):
    """Base class of every error that tidemill raises on purpose."""


class ConfigError(TidemillError):
    """The configuration is invalid; nothing was started."""


class HandlerError(TidemillError):
    """The user's handler is wrong or raised an exception."""


class TooManyFailuresError(HandlerError):
    """More messages of a bounded run failed than `executor.max_failure_ratio` allows."""


class RemoteError(TidemillError):
    """A broker, a sink or a database failed.

    Args:
        message: What happened, to what, and what to do about it.
        retryable: Whether the same call may succeed later (connection, timeout, overload).
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class TargetMissingError(RemoteError):
    """The target of a sink (a table or topic, say) is missing. No payload is to blame; everything waits until it
    exists.
    """


class InvariantError(TidemillError):
    """A bug in tidemill: one of its invariants does not hold. Please report it with the traceback."""


class SinkNotConfiguredError(ConfigError):
    """The pipeline has no sink, or a payload names a sink that is not configured."""


class AmbiguousSinkError(ConfigError):
    """A payload names no sink although several of its type are configured."""


class UserActionError(TidemillError):
    """A user's request to a running pipeline cannot be carried out."""


class FencedError(TidemillError):
    """Another process took over this engine's membership in the consumer group."""


def escape_surrogates(text: str) -> str:
    r"""Return a text that can be encoded: lone surrogates, as in file names that are not UTF-8, are escaped.

    Example:
        >>> escape_surrogates("caf\udce9.jpg")
        'caf\\udce9.jpg'
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error, encodable. It never raises, although a user's `__str__` may.

    Example:
        >>> describe_error(ValueError("no number"))
        'ValueError: no number'
    """
    try:
        text = escape_surrogates(str(error))
    except BaseException:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}"


def find_unexpected(error: BaseException) -> BaseException | None:
    """Return the exception whose traceback is worth showing; None for a configuration or remote error."""
    if isinstance(error, (ConfigError, RemoteError)):
        return None
    # The exception that a hook raised is the cause; the frames around it belong to tidemill.
    return (error.__cause__ if isinstance(error, HandlerError) else None) or error
