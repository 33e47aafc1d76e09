"""The stories of the messages that a question is about, as a document that can travel between processes."""

from __future__ import annotations

import msgspec

from tidemill.recorder.reading.queries import MessageQuery, Trace
from tidemill.recorder.reading.reader import Reader

#: The stories of this many messages are told, the newest ones.
MOST = 10


class Traces(msgspec.Struct):
    """What is known of some messages.

    Attributes:
        found: Messages of which something is recorded, the newest first.
        more: Whether there are more messages.
        first_us: The time of the oldest message that is kept; None: there is none.
        last_us: That of the newest.
        problems: What could not be read.
    """

    found: list[Trace] = []
    more: bool = False
    first_us: int | None = None
    last_us: int | None = None
    problems: list[str] = []

    def add(self, others: Traces) -> None:
        """Add what another process knows."""
        self.found += others.found
        self.more |= others.more
        self.problems = list(dict.fromkeys([*self.problems, *others.problems]))
        first = [at for at in (self.first_us, others.first_us) if at is not None]
        last = [at for at in (self.last_us, others.last_us) if at is not None]
        self.first_us, self.last_us = min(first, default=None), max(last, default=None)


def find_traces(reader: Reader, query: MessageQuery) -> Traces:
    """Return the stories of one message, if the query names one, else of the newest that match."""
    first, last = reader.find_span()
    page_problems: list[str] = []
    if query.topic is not None and query.partition is not None and query.offset is not None:
        traces, more = [reader.trace(query.topic, query.partition, query.offset)], False
    else:
        page = reader.find_messages(query, limit=MOST)
        page_problems = page.problems
        positions = dict.fromkeys((row.topic, row.partition, row.offset) for row in page.rows)
        traces = [reader.trace(*each) for each in list(positions)[:MOST]]
        more = page.cursor is not None or len(positions) > MOST
    problems = dict.fromkeys([*page_problems, *(problem for trace in traces for problem in trace.problems)])
    found = [trace for trace in traces if trace.stories or trace.events or trace.tasks]
    return Traces(found, more, first, last, list(problems))
