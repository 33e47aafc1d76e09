"""The traces of the messages that match a query, as a document that can be sent between processes."""

from __future__ import annotations

import msgspec

from tidemill.recorder.reading.queries import MessageQuery, Trace
from tidemill.recorder.reading.reader import Reader

#: The maximum number of messages in a document; the newest come first.
MOST = 10


class Traces(msgspec.Struct):
    """The traces of some messages.

    Attributes:
        found: Messages with recorded data, newest first.
        more: Whether more messages match.
        first_us: The time of the oldest recorded message; None if there is none.
        last_us: The time of the newest recorded message.
        problems: Descriptions of data that could not be read.
    """

    found: list[Trace] = []
    more: bool = False
    first_us: int | None = None
    last_us: int | None = None
    problems: list[str] = []

    def add(self, others: Traces) -> None:
        """Add the traces from another process."""
        self.found += others.found
        self.more |= others.more
        self.problems = list(dict.fromkeys([*self.problems, *others.problems]))
        first = [at for at in (self.first_us, others.first_us) if at is not None]
        last = [at for at in (self.last_us, others.last_us) if at is not None]
        self.first_us, self.last_us = min(first, default=None), max(last, default=None)


def find_traces(reader: Reader, query: MessageQuery) -> Traces:
    """Return the trace of the one message that the query names, or of the newest messages that match."""
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
