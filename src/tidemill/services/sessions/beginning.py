"""Begins sessions so that a lost answer leaves no second one behind."""

from __future__ import annotations

import secrets

from msgspec.structs import replace

from tidemill.store.calls.service_calls import BeginSession
from tidemill.store.database import StoreCalls
from tidemill.store.wire.remote import call_patiently


def identify_request(about: BeginSession) -> BeginSession:
    """Return the request with a number of its own: repeating it after a lost answer begins no second session."""
    return replace(about, request=secrets.token_hex(16))


async def begin_session(store: StoreCalls, about: BeginSession) -> int:
    """Begin a session, however long the store cannot be reached, and return its id.

    Args:
        store: The store.
        about: Describes the service.
    """
    return await call_patiently(store, identify_request(about))
