"""Describes this process for the session of a service."""

from __future__ import annotations

import os
import socket

from tidemill.runtime.log.setup import version
from tidemill.runtime.process.boot import read_boot_id
from tidemill.store.calls.service_calls import BeginSession


def describe_session(kind: str, name: str, parent: int | None = None) -> BeginSession:
    """Return the request that begins a session of this process.

    Args:
        kind: The kind of the service.
        name: Its name.
        parent: The session of the process that supervises this one; None: it runs by itself.
    """
    host, boot_id = socket.gethostname(), read_boot_id()
    return BeginSession(kind, name, host, boot_id, os.getpid(), parent=parent, version=version())
