"""The command line of tidemill, whose trigger hosts pause for milliseconds before a trigger runs again."""

from __future__ import annotations

from functools import partial

from tidemill.cli.main import main
from tidemill.core.retry import Backoff
from tidemill.triggers import process

if __name__ == "__main__":
    process.TriggerHost = partial(process.TriggerHost, backoff=Backoff(0.001, 0.02))  # type: ignore[misc, assignment]
    main()
