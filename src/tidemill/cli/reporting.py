"""How commands end: an error becomes one line and an exit code; only tidemill's own bugs show a traceback."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

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


def print_error(error: TidemillError) -> None:
    """Write an error to standard error in one line, masking what libraries and handlers said in it."""
    from tidemill.config.redaction import redact_text

    # Configuration errors quote no secrets, and name keys that masking would take for one.
    text = str(error) if isinstance(error, ConfigError) else redact_text(str(error))
    typer.echo(f"error: {text}", err=True)
