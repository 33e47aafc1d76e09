"""Errors: whether a retry can help, and how they are described."""

from __future__ import annotations

from tidemill.core.errors import (
    ConfigError,
    FencedError,
    HandlerError,
    RemoteError,
    TidemillError,
    describe_error,
    escape_surrogates,
    find_unexpected,
)


def test_a_remote_error_is_retryable_unless_it_says_otherwise() -> None:
    assert RemoteError("down").retryable
    assert not RemoteError("refused", retryable=False).retryable
    assert str(RemoteError("down")) == "down"


def test_every_deliberate_error_is_a_tidemill_error() -> None:
    assert issubclass(FencedError, TidemillError)
    assert issubclass(RemoteError, TidemillError)


def test_every_error_can_be_described() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe_error(ValueError("no number")) == "ValueError: no number"
    assert describe_error(Mute()) == "Mute: its text cannot be read"


def test_only_lone_surrogates_are_escaped() -> None:
    for text in ("", "plain", "ümläut \U0001f30a"):
        assert escape_surrogates(text) is text
    assert escape_surrogates("\ud800.jpg") == "\\ud800.jpg"
    assert escape_surrogates(b"caf\xe9".decode("utf-8", "surrogateescape")) == "caf\\udce9"
    assert describe_error(FileNotFoundError("\udcff ü")) == "FileNotFoundError: \\udcff ü"


def test_the_traceback_is_shown_of_what_raised_and_of_nothing_outside() -> None:
    cause, bare, caused = ValueError("x"), HandlerError("y"), HandlerError("z")
    caused.__cause__ = cause
    assert find_unexpected(ConfigError("no such file")) is None
    assert find_unexpected(RemoteError("down")) is None
    assert find_unexpected(cause) is cause
    assert find_unexpected(bare) is bare
    assert find_unexpected(caused) is cause
