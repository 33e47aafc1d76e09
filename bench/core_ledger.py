"""What the ledger costs: nanoseconds per message for open + resolve + its share of ready and settle.

Run: `python bench/core_ledger.py [--messages N]`. JSON lines out, one per shape of load. `share_of_core` is what
20,000 messages a second cost.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from tidemill.core.ledger import Ledger, LedgerEntry

LANES = 4
RATE = 20_000


def in_order(entries: list[LedgerEntry[tuple[str, int], int]]) -> None:
    """Messages end as they came."""


def shuffled(entries: list[LedgerEntry[tuple[str, int], int]]) -> None:
    """Messages end in any order within a round."""
    random.Random(1).shuffle(entries)


def slow_head(entries: list[LedgerEntry[tuple[str, int], int]]) -> None:
    """The first message of the round ends last, so that everything waits behind it."""
    entries.reverse()


def nanoseconds_per_message(order, messages: int, per_round: int) -> float:
    """Open, resolve and settle in rounds of so many messages, as commits every so often do; return the mean."""
    ledger: Ledger[tuple[str, int], int] = Ledger()
    lanes = [("input-events", number) for number in range(LANES)]
    spent = settled = 0
    for _ in range(messages // per_round):
        began = time.perf_counter_ns()
        entries = [ledger.open(lanes[offset % LANES], offset) for offset in range(per_round)]
        spent += time.perf_counter_ns() - began
        order(entries)
        began = time.perf_counter_ns()
        for entry in entries:
            ledger.resolve(entry)
        for batch in ledger.take_all():
            settled += len(batch.entries)
            ledger.settle(batch)
        spent += time.perf_counter_ns() - began
    assert ledger.total == 0
    assert settled == messages // per_round * per_round
    return spent / settled


def main() -> None:
    """Measure each shape three times, print the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=400_000)
    messages = parser.parse_args().messages
    for order, per_round in ((in_order, 2_000), (shuffled, 2_000), (slow_head, 10_000)):
        best = min(nanoseconds_per_message(order, messages, per_round) for _ in range(3))
        print(
            json.dumps(
                {
                    "bench": "core_ledger",
                    "shape": order.__name__,
                    "outstanding": per_round,
                    "messages": messages,
                    "ns_per_message": round(best),
                    "share_of_core_at_20000_per_second": round(best * RATE / 1e9, 4),
                }
            )
        )


if __name__ == "__main__":
    main()
