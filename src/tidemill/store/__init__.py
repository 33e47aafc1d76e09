"""The metadata database: tables, queries over a connection, SQLite and PostgreSQL, and group commit of events."""
