"""The database engines of the store, SQLite and PostgreSQL, and the functions that open them."""
