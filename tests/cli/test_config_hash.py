"""`tidemill config hash`."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from tidemill.cli.config import app
from tidemill.web.access.hashes import hash_token, is_password


def test_a_password_from_standard_input_is_hashed() -> None:
    done = CliRunner().invoke(app, ["hash"], input="correct horse\n")

    assert done.exit_code == 0
    assert is_password("correct horse", done.stdout.strip())
    assert not is_password("wrong horse", done.stdout.strip())


def test_a_short_password_is_refused() -> None:
    done = CliRunner().invoke(app, ["hash"], input="short\n")

    assert done.exit_code == 2
    assert "fewer than 8 characters" in done.stderr


def test_a_token_is_shown_once_with_its_hash() -> None:
    done = CliRunner().invoke(app, ["hash", "--token"])

    token = re.fullmatch(r"token: (\S{40,})\n", done.stderr)
    assert token is not None
    assert done.stdout == f"{hash_token(token[1])}\n"
