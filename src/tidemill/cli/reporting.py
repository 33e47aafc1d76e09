"""How commands end: an error becomes one line and an exit code; only tidemill's own bugs show a traceback.

A command whose output is closed by its reader, as `head` does, ends quietly. A full disk, a folder that denies access
and a path that cannot exist are not bugs. Standard error that cannot be written, because its terminal was closed for
example, changes no exit code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import TextIO

import typer

from tidemill.core.errors import ConfigError, RemoteError, TidemillError
from tidemill.core.wording import to_one_line
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.stop_signals import EarlyStop

#: What the operating system says about a place that cannot take more, and about a path that cannot be used.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ELOOP, errno.ENOTDIR)

#: What commands split their arguments at.
_PARTS = re.compile(r"[:=,]")


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Turn what a command raises into a line on standard error and the exit code of that kind of error.

    Raises:
        typer.Exit: The command failed.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # As `entry` left it: from here on an interrupt is reported; or it ends a start as SIGTERM does, since in what
        # imports call back the exception would be lost.
        early = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, early if isinstance(early, EarlyStop) else signal.default_int_handler)
    with _without_unwritten_errors(), _reporting():
        yield


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    try:
        with let_reader_leave():
            yield
    except TidemillError as error:
        print_error(error)
        raise typer.Exit(find_exit_code(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.STOPPED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if (cause := find_system_cause(error)) is not None:
            print_error(cause)
            raise typer.Exit(find_exit_code(cause)) from None
        from tidemill.config.redaction import redact_text

        with contextlib.suppress(OSError):
            typer.echo(redact_text(traceback.format_exc()), err=True, nl=False)
            typer.echo("error: this is a bug in tidemill (or in a library); please report it", err=True)
        raise typer.Exit(ExitCode.INTERNAL) from None


@contextlib.contextmanager
def _without_unwritten_errors() -> Iterator[None]:
    """Discard at the end what standard error does not take: Python would end with exit code 120 because of it."""
    try:
        yield
    finally:
        try:
            with contextlib.suppress(AttributeError, ValueError):  # it was closed before
                sys.stderr.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def find_system_cause(error: BaseException) -> TidemillError | None:
    """Return what to report for an error of the operating system that no command can prevent; None for any other.

    Example:
        >>> str(find_system_cause(OSError(errno.ENAMETOOLONG, "File name too long", "xxx")))
        "'xxx' cannot be used: File name too long; check the path and its permissions"
    """
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        place = "a file or standard output" if error.filename is None else repr(error.filename)
        return RemoteError(f"cannot write to {place}: {error.strerror}", retryable=False)
    if error.errno in _UNUSABLE and error.filename is not None:
        return ConfigError(f"{error.filename!r} cannot be used: {error.strerror}; check the path and its permissions")
    return None


@contextlib.contextmanager
def let_reader_leave() -> Iterator[None]:
    """End a block without an error if the reader of standard output closed the pipe; what is left is discarded."""
    try:
        yield
    except BrokenPipeError:
        if not _has_reader_left():
            raise
    finally:
        _flush()


@contextlib.contextmanager
def divert_prints(divert: bool) -> Iterator[TextIO]:
    """Yield standard output, for a document; what the user's code prints meanwhile goes to standard error.

    Args:
        divert: False: it is left as it is, since people read both.
    """
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if divert else contextlib.nullcontext():
        yield output


def _has_reader_left() -> bool:
    """Tell whether standard output is a pipe that nobody reads; other pipes break too."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _flush() -> None:
    """Flush standard output, or discard what cannot be written: Python would complain when it flushes at exit."""
    try:
        with contextlib.suppress(AttributeError, ValueError):  # it was closed before
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            raise


def print_error(error: TidemillError) -> None:
    """Write an error to standard error in one line, masking what libraries and handlers said in it.

    A list of problems has a line for each; what the user typed never has more than one.
    """
    from tidemill.config.redaction import redact_text

    # Configuration errors quote no secrets, and name keys that masking would take for one.
    text = str(error) if isinstance(error, ConfigError) else redact_text(str(error))
    with contextlib.suppress(OSError):
        typer.echo(f"error: {_escape_words(text, sys.argv[1:])}", err=True)


def _escape_words(text: str, words: Iterable[str]) -> str:
    """Return a text in which the words of a command, and their parts, are in one line each."""
    parts = [part for word in words if not word.isprintable() for part in (word, *_PARTS.split(word))]
    for part in parts:
        if not part.isprintable():
            text = text.replace(part, to_one_line(part))
    return text
