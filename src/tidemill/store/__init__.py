"""The metadata database: tables, queries, the SQLite and PostgreSQL engines, and group commit of trigger events."""
