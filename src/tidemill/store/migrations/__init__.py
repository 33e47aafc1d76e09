"""The history of the tables as alembic revisions.

Each revision only adds, so that two versions of tidemill can run during a deployment.
"""
