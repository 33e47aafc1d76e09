"""The command line of tidemill, whose trigger hosts pause for milliseconds before a trigger runs again.

`QUICK_HOST_LEASE` says, in seconds, for how long a host may be silent before another one takes its list over. A
transaction may take half of that: it takes a third with the real lease, and a stopped host may be in the middle of one.
"""

from __future__ import annotations

import os
from functools import partial

from tidemill.cli.main import main
from tidemill.core.retry import Backoff
from tidemill.services.triggerer import process
from tidemill.services.triggerer.lists.sessions import SessionPace
from tidemill.store.engines.postgres import open_postgres

if __name__ == "__main__":
    process.ListHost = partial(process.ListHost, backoff=Backoff(0.001, 0.02))  # type: ignore[misc, assignment]
    if lease := float(os.environ.get("QUICK_HOST_LEASE", 0)):
        process.run_host = partial(process.run_host, pace=SessionPace(lease, lease / 6, lease / 20))  # type: ignore[assignment]
        process.open_store = partial(open_postgres, attempt_seconds=lease / 2)  # type: ignore[assignment]
    main()
