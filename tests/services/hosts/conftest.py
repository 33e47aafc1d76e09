"""Real databases for tests of services on many hosts."""

from __future__ import annotations

from tests.store.conftest import own_postgres, postgres

__all__ = ["own_postgres", "postgres"]
