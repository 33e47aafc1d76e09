"""How commands end: an error becomes one line and an exit code; only tidemill's own bugs show a traceback.

A command whose output is closed by its reader, as `head` does, ends quietly.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO

import typer

from tidemill.core.errors import ConfigError, TidemillError
from tidemill.runtime.exitcode import ExitCode, find_exit_code


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Turn what a command raises into a line on standard error and the exit code of that kind of error.

    Raises:
        typer.Exit: The command failed.
    """
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
    except Exception:
        from tidemill.config.redaction import redact_text

        typer.echo(redact_text(traceback.format_exc()), err=True, nl=False)
        typer.echo("error: this is a bug in tidemill (or in a library); please report it", err=True)
        raise typer.Exit(ExitCode.INTERNAL) from None


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
    """Flush standard output, or discard what nobody reads: Python would complain when it flushes at exit."""
    try:
        with contextlib.suppress(AttributeError, ValueError):  # it was closed before
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def print_error(error: TidemillError) -> None:
    """Write an error to standard error in one line, masking what libraries and handlers said in it."""
    from tidemill.config.redaction import redact_text

    # Configuration errors quote no secrets, and name keys that masking would take for one.
    text = str(error) if isinstance(error, ConfigError) else redact_text(str(error))
    typer.echo(f"error: {text}", err=True)
