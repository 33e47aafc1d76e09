"""Turns errors of commands into one line and an exit code; only bugs of tidemill show a traceback.

A command ends quietly if the reader of its output closes the pipe, as `head` does. A full disk, a folder without access
and an impossible path are not bugs. A broken standard error, for example of a closed terminal, changes no exit code.
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

#: Errors of the operating system for a full device, and for a path that cannot be used.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ELOOP, errno.ENOTDIR)

#: The characters at which commands split their arguments.
_PARTS = re.compile(r"[:=,]")


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Turn exceptions of a command into a line on standard error and an exit code.

    Raises:
        typer.Exit: The command failed.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Replace the handler that `entry` has set: from here on an interrupt is reported. During startup it acts like
        # SIGTERM, because imports that call back would swallow the exception.
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
            typer.echo(
                "error: this is a bug in tidemill or in a library; please report it with the traceback above", err=True
            )
        raise typer.Exit(ExitCode.INTERNAL) from None


@contextlib.contextmanager
def _without_unwritten_errors() -> Iterator[None]:
    """Discard text that standard error does not accept; Python would otherwise end with exit code 120."""
    try:
        yield
    finally:
        try:
            with contextlib.suppress(AttributeError, ValueError):  # it was closed before
                sys.stderr.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def find_system_cause(error: BaseException) -> TidemillError | None:
    """Return a report for an error of the operating system that commands cannot prevent; None for any other error.

    Example:
        >>> str(find_system_cause(OSError(errno.ENAMETOOLONG, "File name too long", "xxx")))
        "'xxx' cannot be used: File name too long; check the path and its permissions"
    """
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        target = "a file or standard output" if error.filename is None else repr(error.filename)
        return RemoteError(f"cannot write to {target}: {error.strerror}", retryable=False)
    if error.errno in _UNUSABLE and error.filename is not None:
        return ConfigError(f"{error.filename!r} cannot be used: {error.strerror}; check the path and its permissions")
    return None


@contextlib.contextmanager
def let_reader_leave() -> Iterator[None]:
    """End a block without an error if the reader of standard output closes the pipe; discard the rest of the output."""
    try:
        yield
    except BrokenPipeError:
        if not _has_reader_left():
            raise
    finally:
        _flush()


@contextlib.contextmanager
def divert_prints(divert: bool) -> Iterator[TextIO]:
    """Yield standard output, for a document; redirect prints of the user's code to standard error meanwhile.

    Args:
        divert: False: redirect nothing, because a person reads both.
    """
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if divert else contextlib.nullcontext():
        yield output


def _has_reader_left() -> bool:
    """Return whether standard output is a pipe without a reader; other pipes may break too."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _flush() -> None:
    """Flush standard output, or discard its buffer; otherwise Python would report an error when it flushes at exit."""
    try:
        with contextlib.suppress(AttributeError, ValueError):  # it was closed before
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            raise


def print_error(error: TidemillError) -> None:
    """Write an error to standard error, with secrets in texts of libraries and handlers masked.

    A list of problems has a line for each; text that the user typed is always escaped into one line.
    """
    from tidemill.config.redaction import redact_text

    # Configuration errors quote no secrets, and masking would take some of their keys for secrets.
    text = str(error) if isinstance(error, ConfigError) else redact_text(str(error))
    with contextlib.suppress(OSError):
        typer.echo(f"error: {_escape_words(text, sys.argv[1:])}", err=True)


def _escape_words(text: str, words: Iterable[str]) -> str:
    """Return a text in which words of the command, and their parts, are escaped into one line each."""
    parts = [part for word in words if not word.isprintable() for part in (word, *_PARTS.split(word))]
    for part in parts:
        if not part.isprintable():
            text = text.replace(part, to_one_line(part))
    return text
