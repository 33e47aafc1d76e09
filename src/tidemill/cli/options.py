"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.completion import complete_handlers

HandlerName = Annotated[
    str,
    typer.Option(
        "--handler",
        metavar="MODULE:CLASS",
        help="The handler, for example handler:LogHandler.",
        autocompletion=complete_handlers,
    ),
]
#: Not "[CONFIG]": the brackets of an optional argument are added when it is displayed.
ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="The YAML file; default: the file in TIDEMILL_CONFIG.")
]
