"""The history of the tables, as alembic revisions; each only adds, so that two versions can run during a deploy."""
