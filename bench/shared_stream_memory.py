"""What a shared stream keeps in memory over a million events, with a subscriber that lags nearly as far as it may.

    python -m bench.shared_stream_memory [--events 1000000]

A JSON line per mode: resident memory after each tenth of the events. Flat: the last is within 2 % of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from tests.triggers.streams.endless import LAG, endless


def main() -> int:
    """Measure both modes; the exit code says whether both are flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    args = parser.parse_args()
    good = True
    for mode in ("fast", "ack"):
        kib = asyncio.run(endless(mode, args.events))
        flat = kib[-1] <= kib[0] * 1.02
        good &= flat
        row = {"bench": "shared_stream_memory", "mode": mode, "events": args.events, "lag": LAG, "kib": kib}
        print(json.dumps({**row, "holds": flat}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
