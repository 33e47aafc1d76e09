"""Asks the trigger hosts of a list what they do, over their control sockets.

The names of the sockets begin with a digest of the list's path, so that who knows the list finds its hosts on this
machine: the one that runs it, and those that wait to take over. A host reads nothing of what it is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.core.errors import RemoteError
from tidemill.runtime import control_socket
from tidemill.runtime.control_socket import Answers, ControlSocket, prefix_of


def control_server(specs: Path, report: Callable[[], dict[str, Any]]) -> ControlSocket:
    """Return what tells anybody who connects what this process does.

    Args:
        specs: The list of triggers of this host.
        report: Returns what there is to say; quick.
    """
    return ControlSocket(_prefix(specs), lambda request: report())


def ask(specs: Path) -> Answers:
    """Return the reports of the hosts of a list; the one that runs the list first.

    Raises:
        RemoteError: There is none.
    """
    answers = control_socket.ask(_prefix(specs))
    if not answers.reports and not answers.silent:
        raise RemoteError(f"no host runs {specs} on this machine; start one: tidemill triggers run {specs}")
    return Answers(sorted(answers.reports, key=lambda report: bool(report.get("waits_for"))), answers.silent)


def no_answer(specs: Path) -> RemoteError:
    """Return the error that says that a host is there and silent."""
    return RemoteError(
        f"a host of {specs} does not answer within {control_socket.ANSWER_SECONDS:g} s; look into its log for what "
        "blocks it"
    )


def _prefix(specs: Path) -> str:
    return prefix_of("triggers", os.fsencode(specs.resolve()))
