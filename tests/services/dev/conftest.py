"""Real databases for tests of `dev`."""

from __future__ import annotations

from tests.store.conftest import database, postgres, url

__all__ = ["database", "postgres", "url"]
