"""The streams of triggers: events that an attempt takes in batches, and keeps as handled.

Theory of operation: the triggerer stores events under the trigger's cursor. An attempt that runs takes them, and keeps
a batch once it has handled it. If the task waits without a worker when an event arrives, the stream is marked, and the
next turn of the scheduler resumes the task.

Events of an acknowledged shared stream cannot come again from upstream. Those that a failed or cleared try has not
handled are delivered in the next one that streams, before its own events, under the number of their own trigger. Only a
STOP, a mark and a cancelled run discard them.

While the backlog of a map over the task is full, its events wait; too many of them make the trigger wait, too. An event
that ends the task follows all events before it.

Invariants: storing an event locks neither task nor run. Whether a task may leave its worker is decided under the lock
of the trigger's cursor, as streams are marked, so no event is overlooked between the two. A batch is kept in one
transaction, by the attempt that holds the task. After a STOP no event is delivered.
"""
