"""The databases behind the store, SQLite and PostgreSQL, and how one is opened."""
