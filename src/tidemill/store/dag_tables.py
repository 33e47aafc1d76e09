"""The tables for DAGs in SQLAlchemy Core; `migrations` creates the same tables.

Invariants: the same as in `tables`. Tasks change state only through `queries.dags.state.transition`. Transactions lock
rows in one order: service, DAG, pool, runs by id, tasks by id, trigger cursors, maps. Claims skip locked tasks and
never wait for them. Each waiting state has a partial index of its own, so queries find waiting tasks without reading
finished ones.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, LargeBinary, Table, Text, UniqueConstraint, text

from tidemill.store.tables import Id, metadata

#: Tasks that hold pool slots and count against limits. Queries use this text verbatim so that it matches the index.
#: 1 and 2 are the phases of `core.tasks.task_row.BlockPhase` in which a waiting attempt has no slots.
HOLDS_SLOTS = "state IN ('queued', 'running', 'ending') AND block NOT IN (1, 2)"
#: Running attempts that wait at their `yield`.
IS_BLOCKED = "state = 'running' AND block > 0"
IS_DEFERRED = "state = 'deferred'"
#: Elements of mapped tasks that failed. Queries use this text verbatim, too.
IS_BAD_ELEMENT = "state IN ('failed', 'upstream_failed') AND map_index >= 0"
#: Elements of mapped tasks that were skipped. Queries use this text verbatim, too.
IS_SKIPPED_ELEMENT = "state = 'skipped' AND map_index >= 0"
#: Elements of an attempt that runs all of them that have not succeeded. Queries use this text verbatim, too.
IS_LEFT_PART = "state != 'success'"
#: Tasks, as opposed to elements of mapped tasks.
IS_UNMAPPED = "map_index = -1"
#: The condition on the rank that `queries.dags.state.task_rows.is_resumed` checks.
IS_RESUMED = "state = 'scheduled' AND rank < -549755813888"


def _partial(name: str, *columns: Column[object], where: str) -> None:
    Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


#: One row per file that was ever parsed. `present`: 0 once the file has been removed.
dag_file = Table(
    "dag_file",
    metadata,
    Column("id", Id, primary_key=True),
    Column("path", Text, nullable=False, unique=True),
    Column("digest", Text, nullable=False),
    Column("modules", Text, nullable=False),
    Column("error", Text),
    Column("present", BigInteger, nullable=False),
    Column("parsed_us", BigInteger, nullable=False),
    Column("unshared", Text),
    Column("session_id", Id),
    Column("absent", Text, nullable=False, server_default=text("'[]'")),
)

#: One row per file that a live parser or worker lacks, or has with another content. `difference`: `missing` or
#: `differs`; `since_us`: the time from which it has been so.
file_difference = Table(
    "file_difference",
    metadata,
    Column("session_id", Id, primary_key=True, autoincrement=False),
    Column("path", Text, primary_key=True),
    Column("difference", Text, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

#: One row per DAG that was ever stored. `next_us`: the due time of the next scheduled run; `last_us`: the due time of
#: the last one; `known_us`: the time from which the schedule applies, that is, since it became known and was not
#: paused. `by_past`: 1 if tasks of a run depend on the previous run.
dag = Table(
    "dag",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dag_id", Text, nullable=False, unique=True),
    Column("file_id", Id, ForeignKey("dag_file.id"), nullable=False),
    Column("version_id", Id, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("active", BigInteger, nullable=False),
    Column("paused", BigInteger, nullable=False),
    Column("next_us", BigInteger),
    Column("last_us", BigInteger),
    Column("known_us", BigInteger, nullable=False),
    Column("max_active_runs", BigInteger, nullable=False),
    Column("by_past", BigInteger, nullable=False, server_default=text("0")),
    Column("schedule", Text, nullable=False),
    Column("tags", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
)

Index("ix_dag_file", dag.c.file_id)
_partial("ix_dag_due", dag.c.next_us, where="next_us IS NOT NULL AND active = 1 AND paused = 0")

#: One row per version of a DAG; `digest` is the digest of `structure`.
dag_version = Table(
    "dag_version",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dag", Id, ForeignKey("dag.id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),
    Column("structure", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("dag", "number", name="uq_dag_version_number"),
)

#: One row per run. `unfinished`: the number of tasks that have not ended. `stop`: the reason why the remaining tasks
#: are being stopped; NULL once none is left.
dag_run = Table(
    "dag_run",
    metadata,
    Column("id", Id, primary_key=True),
    Column("dag", Id, ForeignKey("dag.id"), nullable=False),
    Column("version_id", Id, ForeignKey("dag_version.id"), nullable=False),
    Column("run_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("stop", Text),
    Column("unfinished", BigInteger, nullable=False),
    Column("conf", Text, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("request", Text),
    Column("logical_us", BigInteger),
    Column("interval_start_us", BigInteger),
    Column("interval_end_us", BigInteger),
    Column("created_us", BigInteger, nullable=False),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    Column("deadline_us", BigInteger),
    UniqueConstraint("dag", "run_id", name="uq_dag_run_name"),
    UniqueConstraint("dag", "logical_us", name="uq_dag_run_logical"),
    UniqueConstraint("dag", "request", name="uq_dag_run_request"),
)

Index("ix_dag_run_dag", dag_run.c.dag, dag_run.c.id)
# These indexes include the state so that SQLite prefers them over the index above, which covers all runs.
_partial("ix_dag_run_failed", dag_run.c.dag, dag_run.c.state, dag_run.c.id, where="state = 'failed'")
_partial("ix_dag_run_queued", dag_run.c.dag, dag_run.c.state, dag_run.c.id, where="state = 'queued'")
_partial("ix_dag_run_running", dag_run.c.dag, dag_run.c.state, dag_run.c.id, where="state = 'running'")
_partial("ix_dag_run_stop", dag_run.c.id, where="stop IS NOT NULL")
_partial("ix_dag_run_deadline", dag_run.c.deadline_us, where="deadline_us IS NOT NULL AND state = 'running'")

#: One row per task instance, which `run`, `task_id` and `map_index` name (-1: not an element of a mapped task): the
#: fields of `core.tasks.task_row.TaskRow`, the outcomes of its upstream tasks (`tallies`: the counts of
#: `core.tasks.dependencies.Upstream`), and the columns that queries search by. `pending`: 1 if the scheduler must
#: still decide the task. `skip_votes`: the number of upstream tasks that skip it by name; `skips`: the tasks it skips.
#: `rank`: the order of waiting tasks. `number`: the index in the structure. `ending_outcome`: the state that follows
#: the ending; NULL: the task is queued again. `label`: what an attempt of an element made of `map_index_template`.
#: `ending_triggerer`: the session that ends its
#: trigger, while its worker ends the attempt.
#: `block`: the phase of the wait of a running attempt at its `yield`, which began at `block_us`; 0: it does not wait.
task_instance = Table(
    "task_instance",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run", Id, ForeignKey("dag_run.id"), nullable=False),
    Column("dag", Id, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("map_index", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("queue", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("pool_slots", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("tries_before", BigInteger, nullable=False),
    Column("max_tries", BigInteger, nullable=False),
    Column("session_id", Id),
    Column("ending_outcome", Text),
    Column("lost", BigInteger, nullable=False),
    Column("deadline_us", BigInteger),
    Column("due_us", BigInteger),
    Column("next_due_us", BigInteger),
    Column("resume_method", Text),
    Column("resume_kwargs", Text),
    Column("resume_payload", Text),
    Column("stream_epoch", BigInteger),
    Column("stream_due_us", BigInteger),
    Column("stream_paused", BigInteger),
    Column("ending_triggerer", Id),
    Column("tallies", Text, nullable=False),
    Column("pending", BigInteger, nullable=False),
    Column("skip_votes", BigInteger, nullable=False),
    Column("skips", Text),
    Column("rank", BigInteger, nullable=False),
    Column("since_us", BigInteger, nullable=False),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    Column("claim_request", BigInteger),
    Column("error", Text),
    Column("label", Text),
    Column("block", BigInteger, nullable=False, server_default=text("0")),
    Column("block_us", BigInteger),
    Column("items_digest", BigInteger),
    UniqueConstraint("run", "task_id", "map_index", name="uq_task_instance_name"),
)

_WAITING = (task_instance.c.rank, task_instance.c.since_us, task_instance.c.id)
_partial("ix_task_scheduled", task_instance.c.pool, *_WAITING, where="state = 'scheduled'")
_partial("ix_task_queued", task_instance.c.queue, *_WAITING, where="state = 'queued'")
_partial("ix_task_slots", task_instance.c.pool, where=HOLDS_SLOTS)
_partial("ix_task_blocked", task_instance.c.pool, task_instance.c.block, task_instance.c.id, where=IS_BLOCKED)
_partial("ix_task_deferred", task_instance.c.dag, task_instance.c.task_id, where=IS_DEFERRED)
_partial("ix_task_deferred_pool", task_instance.c.pool, where=IS_DEFERRED)
_partial("ix_task_resumed", task_instance.c.dag, task_instance.c.task_id, where=IS_RESUMED)
_partial("ix_task_session", task_instance.c.session_id, where="session_id IS NOT NULL")
_partial("ix_task_ending_triggerer", task_instance.c.ending_triggerer, where="ending_triggerer IS NOT NULL")
_partial("ix_task_due", task_instance.c.next_due_us, where="next_due_us IS NOT NULL")
_partial("ix_task_pending", task_instance.c.run, task_instance.c.id, where="pending = 1")
_partial("ix_task_unmapped", task_instance.c.run, task_instance.c.number, task_instance.c.id, where=IS_UNMAPPED)
_partial(
    "ix_task_element_waiting",
    task_instance.c.run,
    task_instance.c.task_id,
    task_instance.c.map_index,
    where="pending = 2",
)
_partial(
    "ix_task_element_failed",
    task_instance.c.run,
    task_instance.c.task_id,
    task_instance.c.map_index,
    where=IS_BAD_ELEMENT,
)
_partial(
    "ix_task_element_skipped",
    task_instance.c.run,
    task_instance.c.task_id,
    task_instance.c.map_index,
    where=IS_SKIPPED_ELEMENT,
)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


#: One row per mapped task of a run. `task`: its head, the instance with map_index -1. The counts, and `stop`, are those
#: of `core.tasks.expansion.MapRow`; `made`: the number of element rows, which have the indexes below it. `told`: what
#: successors were told. `pending`: 1 if the scheduler must look at the map. `sources`: where the items are, set when
#: the map opens. `error`: why the map cannot expand. `max_outstanding`, `max_length`, `max_backlog`: the limits of the
#: settings when the map opened. `due_us`: when the unfinished chunk of the map is cut at the latest.
task_map = Table(
    "task_map",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("run", Id, nullable=False),
    Column("task_id", Text, nullable=False),
    _count("opened"),
    _count("closed"),
    _count("arrived"),
    _count("created"),
    _count("made"),
    _count("waiting"),
    _count("unfinished"),
    _count("retrying"),
    _count("success"),
    _count("failed"),
    _count("upstream_failed"),
    _count("skipped"),
    _count("told"),
    _count("pending"),
    Column("stop", Text),
    Column("sources", Text),
    Column("error", Text),
    Column("max_outstanding", BigInteger),
    Column("max_length", BigInteger),
    Column("max_backlog", BigInteger),
    Column("due_us", BigInteger),
    Column("compared", BigInteger),
    UniqueConstraint("run", "task_id", name="uq_task_map_name"),
)
_partial("ix_task_map_pending", task_map.c.task, where="pending = 1")
_partial("ix_task_map_due", task_map.c.due_us, where="due_us IS NOT NULL")

#: The items of sources: what a generator yielded, and the values of a list that a map was opened over. `task` and
#: `key`: the XCom that they are of, or the head of a map and the name of a parameter.
#: `size_up_to`: for a generator, the size of the values of this item and of all before it.
map_item = Table(
    "map_item",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("value", Text, nullable=False),
    Column("size_up_to", BigInteger, nullable=False, server_default=text("0")),
    # Stored with row ids, because a value may be up to a megabyte.
)

#: One row per element of a streaming task that was emitted with an identity; such an element is stored once.
map_identity = Table(
    "map_identity",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("identity", Text, primary_key=True),
    sqlite_with_rowid=False,
)

#: One row per task instance that runs all elements of its task in one attempt: how many have ended, by state, how many
#: run, and how many its attempts have read (`seen`).
task_iteration = Table(
    "task_iteration",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    _count("seen"),
    _count("running"),
    _count("success"),
    _count("failed"),
    _count("skipped"),
    _count("up_for_retry"),
    _count("began_us"),
    _count("changed_us"),
)

#: One row per element of such an instance that has ended, or waits for its next try.
task_part = Table(
    "task_part",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("value", Text),
    Column("error", Text),
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger, nullable=False),
    # Stored with row ids, because a value may be up to a megabyte.
)
_partial("ix_task_part_unsuccessful", task_part.c.task, task_part.c.number, where=IS_LEFT_PART)

#: One row per change of a task's state, keyed by the epoch that the change produced.
task_journal = Table(
    "task_journal",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("before", Text, nullable=False),
    Column("after", Text, nullable=False),
    Column("given", Text, nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("said_by", Text, nullable=False),
    Column("detail", Text),
    sqlite_with_rowid=False,
)

#: One row per user callback that is due, running or done. `task`: NULL for a callback of the whole run. `started_us`:
#: the start of the try that caused the callback; `origin`: the class and traceback locations of the exception in
#: `cause`. A row with the name `trigger_on_kill` has triggerers call `on_kill` of the trigger with this task and epoch;
#: its state is `kill` while it is due.
task_callback = Table(
    "task_callback",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run", Id, ForeignKey("dag_run.id"), nullable=False),
    Column("task", Id),
    Column("epoch", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("cause", Text),
    Column("queue", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("session_id", Id),
    Column("claim_request", BigInteger),
    Column("lost", BigInteger, nullable=False),
    Column("error", Text),
    Column("created_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger),
    Column("started_us", BigInteger),
    Column("origin", Text),
    Index("ix_task_callback_run", "run", "id"),
)

_partial("ix_task_callback_due", task_callback.c.queue, task_callback.c.id, where="state = 'due'")
_partial("ix_task_callback_kill", task_callback.c.queue, task_callback.c.id, where="state = 'kill'")
_partial("ix_task_callback_session", task_callback.c.session_id, where="session_id IS NOT NULL")

xcom = Table(
    "xcom",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # Stored with row ids, because a value may be up to a megabyte.
)

#: Values that a task keeps across its tries.
task_state = Table(
    "task_state",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
)

#: The logs of tries in compressed parts. `try_number` 0 holds the log of the callbacks.
task_log = Table(
    "task_log",
    metadata,
    Column("task", Id, primary_key=True, autoincrement=False),
    Column("try_number", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("first_us", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("lines", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
)

#: The pools; admissions lock their rows.
pool = Table(
    "pool",
    metadata,
    Column("name", Text, primary_key=True),
    Column("slots", BigInteger, nullable=False),
    Column("description", Text, nullable=False),
    Column("include_deferred", BigInteger, nullable=False),
)

#: `value` is encrypted (see `ciphers`).
variable = Table(
    "variable",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
)

#: `value` is encrypted (see `ciphers`): a JSON object of the fields that lists do not show.
connections = Table(
    "connection",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("host", Text),
    Column("port", BigInteger),
    Column("schema", Text),
    Column("login", Text),
    Column("description", Text),
    Column("value", Text, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
)
