"""How a tidemill process ends: one number per kind of ending, the same for every command.

Nothing else in tidemill chooses an exit code: an error that ends a process is mapped here.
"""

from __future__ import annotations

import enum
from typing import Final

from tidemill.core.errors import ConfigError, FencedError, HandlerError, RemoteError


class ExitCode(enum.IntEnum):
    """Why a process ended."""

    #: The work is done, or was drained after a first SIGTERM, SIGINT or SIGHUP.
    OK = 0
    #: An error inside tidemill; a traceback is shown.
    INTERNAL = 1
    #: The configuration (or the command line) is wrong; nothing was started.
    CONFIG = 2
    #: The handler does not import, does not pickle, or raised where it must not.
    HANDLER = 3
    #: A broker, Spark or a sink failed.
    REMOTE = 4
    #: Another process uses the same worker name.
    FENCED = 5
    #: What was asked for is not there, or not any more.
    NOTHING_FOUND = 6
    #: Stopped at once, by a second signal.
    STOPPED = 130


#: How a triggerer tells `tidemill dev`, which started it, that a trigger has blocked it, whose task has failed for it.
BLOCKED: Final = 7


def find_exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of a process that ends with `error`.

    Example:
        >>> find_exit_code(ConfigError("kafka.broker: unknown key"))
        <ExitCode.CONFIG: 2>
    """
    # Every command imports this module, and few of them lock anything.
    from tidemill.runtime.lock import WorkerNameInUseError

    match error:
        case WorkerNameInUseError() | FencedError():
            return ExitCode.FENCED
        case ConfigError():
            return ExitCode.CONFIG
        case HandlerError():
            return ExitCode.HANDLER
        case RemoteError():
            return ExitCode.REMOTE
        case KeyboardInterrupt():
            return ExitCode.STOPPED
        case _:
            return ExitCode.INTERNAL
