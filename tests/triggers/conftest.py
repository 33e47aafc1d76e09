from tests.store.conftest import database, own_postgres, postgres, url

__all__ = ["database", "own_postgres", "postgres", "url"]
