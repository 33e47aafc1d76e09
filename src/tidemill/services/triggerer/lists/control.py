"""Queries the trigger hosts of a list over their control sockets.

The names of the sockets begin with a digest of the list's path, which identifies the hosts of a list on this machine:
the host that runs it, and those that wait to take over. A host ignores the content of requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.core.errors import RemoteError
from tidemill.runtime.sockets import control_socket
from tidemill.runtime.sockets.control_socket import ControlSocket, ProcessAnswers, prefix_of

KIND = "triggers"


def control_server(specs: Path, report: Callable[[], dict[str, Any]]) -> ControlSocket:
    """Return a server that reports the state of this process.

    Args:
        specs: The list of triggers of this host.
        report: Returns the report; it must not block.
    """
    return ControlSocket(_build_prefix(specs), lambda request: report())


def ask(specs: Path) -> ProcessAnswers:
    """Return the reports of the hosts of a list, beginning with the host that runs it.

    Raises:
        RemoteError: There is no host.
    """
    answers = control_socket.ask(_build_prefix(specs))
    if not answers.reports and not answers.silent:
        raise RemoteError(f"no trigger host runs {specs} on this machine; start one: tidemill triggers run {specs}")
    return ProcessAnswers(sorted(answers.reports, key=lambda report: bool(report.get("waits_for"))), answers.silent)


def ask_hosts(specs: Path | None, seconds: float) -> ProcessAnswers:
    """Return the reports of the hosts of a list, or of all lists; there may be none.

    Args:
        specs: The list; None: all hosts of this user.
        seconds: How long to wait for answers.
    """
    return control_socket.ask(f"{KIND}." if specs is None else _build_prefix(specs), {"do": "status"}, seconds)


def build_silence_error(specs: Path) -> RemoteError:
    """Return the error for a host that does not answer."""
    return RemoteError(
        f"a host of {specs} did not answer within {control_socket.ANSWER_SECONDS:g} s; its log names what blocks it"
    )


def _build_prefix(specs: Path) -> str:
    return prefix_of(KIND, os.fsencode(specs.resolve()))
