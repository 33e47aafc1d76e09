"""How PgBouncer refuses transactions, for the sink and the store in PostgreSQL."""

from __future__ import annotations

#: What to do about it; follows the name of what refuses.
STATEMENT_MODE = (
    "the pooler in front of the server is in statement mode, which has no transactions; "
    "set its pool_mode to transaction or session"
)
#: A part of what PgBouncer says before it closes the connection; it is not translated.
_REFUSAL = "statement pooling mode"


def is_statement_mode(error: BaseException) -> bool:
    """Return whether a transaction could not begin because the pooler is in statement mode."""
    return _REFUSAL in str(error)
