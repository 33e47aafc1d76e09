"""Errors say whether trying again can help."""

from __future__ import annotations

from tidemill.core.errors import FencedError, RemoteError, TidemillError, describe_error, sound


def test_a_remote_error_may_be_tried_again_unless_it_says_otherwise() -> None:
    assert RemoteError("down").retryable
    assert not RemoteError("refused", retryable=False).retryable
    assert str(RemoteError("down")) == "down"


def test_every_error_on_purpose_is_caught_as_one() -> None:
    assert issubclass(FencedError, TidemillError)
    assert issubclass(RemoteError, TidemillError)


def test_what_an_error_says_can_always_be_said() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe_error(ValueError("no number")) == "ValueError: no number"
    assert describe_error(Mute()) == "Mute: its text cannot be read"


def test_a_text_is_made_sound_for_every_encoder_and_left_alone_where_it_is() -> None:
    for text in ("", "plain", "ümläut \U0001f30a"):
        assert sound(text) is text
    assert sound("\ud800.jpg") == "\\ud800.jpg"
    assert sound(b"caf\xe9".decode("utf-8", "surrogateescape")) == "caf\\udce9"
    assert describe_error(FileNotFoundError("\udcff ü")) == "FileNotFoundError: \\udcff ü"
