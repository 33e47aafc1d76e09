"""Recognises PgBouncer's refusals, for the sink and the store in PostgreSQL, by their texts, because they have no
codes.
"""

from __future__ import annotations

#: The advice for statement mode; follows the name of the refusing part.
STATEMENT_MODE = (
    "the pooler in front of the server is in statement mode, which has no transactions; "
    "set its pool_mode to transaction or session"
)
#: Parts of PgBouncer's messages before it closes the connection; they are not translated.
_REFUSAL = "statement pooling mode"
_WRONG_LOGINS = (
    "authentication failed",
    "no such user",
    "no such database",
    "does not exist",
    "unsupported startup parameter",
)


def is_statement_mode(error: BaseException) -> bool:
    """Return whether a transaction could not begin because the pooler is in statement mode."""
    return _REFUSAL in str(error)


def is_wrong_login(error: BaseException) -> bool:
    """Return whether the user, the password, the database or a parameter is wrong, rather than the pooler busy."""
    text = str(error)
    return any(part in text for part in _WRONG_LOGINS)
