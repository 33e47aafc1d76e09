"""The exit codes of tidemill's processes: one number per kind of ending, the same for every command.

No other module chooses an exit code; an error that ends a process is mapped here.
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
    #: The handler does not import, does not pickle, or raised in a hook that must not raise.
    HANDLER = 3
    #: A broker, Spark or a sink failed.
    REMOTE = 4
    #: Another process uses the same worker name.
    FENCED = 5
    #: The requested object does not exist, or no longer exists.
    NOTHING_FOUND = 6
    #: Stopped at once, by a second signal.
    STOPPED = 130


#: Tells `tidemill dev`, the parent of a triggerer, that a trigger blocked the triggerer and that its task has failed.
BLOCKED: Final = 7


def find_exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of a process that ends with `error`.

    Example:
        >>> find_exit_code(ConfigError("kafka.broker: unknown key"))
        <ExitCode.CONFIG: 2>
    """
    # Imported here, because every command imports this module but few use locks.
    from tidemill.runtime.files.lock import WorkerNameInUseError

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
