"""The socket on which a process answers the calls of the services that it supervises."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.services.supervision.call_socket import serve_calls


class Publishing:
    """A database that keeps what is published."""

    path = ""
    doorbell = SimpleNamespace(listen=lambda ring: None, ignore=lambda ring: None)

    def publish(self, path: str) -> None:
        self.path = path


@pytest.mark.parametrize("length", [20, 64, 65, 120])
async def test_the_folder_of_temporary_files_may_have_a_long_path(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1)) if length > len(short) + 1 else Path(short)
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        database: Any = Publishing()
        async with serve_calls(database, database) as path:
            assert path.is_socket()
            assert database.path == str(path)
        assert not path.parent.exists()
