"""Feeds inputs to tasks and stores all consequences; every change of a task goes through here.

Invariants: state, journal, XComs, triggers, the successors' tallies and the decisions that follow from them are one
transaction. A run ends in the same transaction as its last task.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sqlalchemy import Connection, and_, select, text, union_all

from tidemill.core.retry import JITTER_BITS
from tidemill.core.tasks.attempt import Answer
from tidemill.core.tasks.expansion import MapStopReason
from tidemill.core.tasks.inputs import Cancel, Channel, CleanedUp, Ended, Input
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import ENDED, TaskState
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_UNMAPPED, task_instance, task_map
from tidemill.store.queries.dags.state.effects import DueCallback
from tidemill.store.queries.dags.state.task_rows import RunEntry
from tidemill.store.queries.dags.state.transition import Board, write_boards

_TASK, _MAP = task_instance.c, task_map.c
_ENDED = tuple(sorted(state.value for state in ENDED))


def move_tasks(
    connection: Connection, given: Iterable[tuple[int, Input]], context: CallContext, by: str
) -> list[Answer | None]:
    """Feed inputs to tasks and store the consequences.

    Args:
        connection: A connection inside a transaction that holds no locks later in the order than runs.
        given: Pairs of a task and an input, in order.
        context: The transaction's context.
        by: The sender of the inputs, for the journal.

    Returns:
        The state machine's answer to each input; None: there is no such task.
    """
    pairs = list(given)
    if not pairs:
        return []
    board = Board(connection, context)
    board.lock({task for task, _ in pairs})
    answers = board.give_all(pairs, by)
    close_board(board)
    return answers


def move_held(
    connection: Connection,
    tasks: Collection[int],
    session: int,
    build: Callable[[int], Input],
    context: CallContext,
    by: str,
) -> int:
    """Feed inputs to the tasks that a session still holds after they are locked; return their number.

    In the meantime a user may have cleared or marked a task; then it is ending and has a new epoch.

    Args:
        connection: A connection inside a transaction that holds no locks later in the order than runs.
        tasks: Tasks that the session may hold.
        session: The session.
        build: Returns the input for the epoch of a task.
        context: The transaction's context.
        by: The sender of the inputs, for the journal.
    """
    return move_all_held(connection, tasks, {session: (build, by)}, context)


def move_all_held(
    connection: Connection,
    tasks: Collection[int],
    sessions: Mapping[int, tuple[Callable[[int], Input], str]],
    context: CallContext,
) -> int:
    """Feed inputs to the tasks that several sessions still hold or whose triggers they had to end; see `move_held`.

    Args:
        connection: As in `move_held`.
        tasks: Tasks that the sessions may hold.
        sessions: Each session with the function that builds the inputs of its tasks, and their sender.
        context: The transaction's context.
    """
    if not tasks:
        return 0
    board = Board(connection, context)
    board.lock(tasks)
    count = 0
    for session, (build, by) in sessions.items():
        held = [entry for entry in board.tasks.values() if entry.row.session == session]
        board.give_all([(entry.id, build(entry.row.epoch)) for entry in held], by)
        # A task whose process is still being ended waits for that alone.
        over = [entry for entry in board.tasks.values() if entry.row.ending and entry.row.ending.triggerer == session]
        board.give_all([(entry.id, CleanedUp(entry.row.epoch)) for entry in over], by)
        count += len(held) + len(over)
    close_board(board)
    return count


def end_cleanups(connection: Connection, tasks: Collection[int], session: int, context: CallContext, by: str) -> int:
    """Store that the triggers of ending tasks, which a session had to end, have cleaned up or are gone with it.

    The arguments are those of `move_held`. A task whose process is still being ended waits for that alone.
    """
    if not tasks:
        return 0
    board = Board(connection, context)
    board.lock(tasks)
    given: list[tuple[int, Input]] = []
    for entry in board.tasks.values():
        row = entry.row
        if row.ending is not None and row.session == session:
            given.append((entry.id, Ended(row.epoch)))
        elif row.ending is not None and row.ending.triggerer == session:
            given.append((entry.id, CleanedUp(row.epoch)))
    board.give_all(given, by)
    close_board(board)
    return len(given)


def close_board(board: Board, *, stops: bool = True, writes: bool = True) -> None:
    """Settle all consequences, up to the board's limit, and write everything.

    Runs that are not locked stay as they are: another transaction stops and ends them, with their last task.

    Args:
        board: The board.
        stops: Whether to stop the tasks of runs that are being stopped; the scheduler does it otherwise.
        writes: Whether to write the rows. Otherwise the caller does it, and nothing else reads them before; those of
            runs that are being stopped are written in any case.
    """
    board.settle()
    locked = [run for number, run in board.runs.items() if number in board.locked]
    for run in locked:
        if run.stop is not None and stops:
            _stop_some(board, run)
            writes = True  # a worker that claims next must not find the tasks that are cancelled now
    for run in locked:
        if not run.unfinished and (run.state == "running" or (run.state == "queued" and run.reason)):
            end_run(board, run)
    if board.left:
        board.context.left = True
        board.context.bells.add(Channel.SCHEDULER)
    if writes:
        board.flush_rows()
    if board.context.untold is None:
        write_boards([board])
    else:
        board.context.untold.append(board)


def tell_maps(connection: Connection, context: CallContext) -> None:
    """Tell maps what has become of their elements, if that was left to the end of the transaction.

    No row may be locked afterwards, unless it is free.
    """
    boards, context.untold = context.untold, None
    if boards:
        write_boards(boards)


def _stop_some(board: Board, run: RunEntry) -> None:
    """Cancel tasks of a run that is being stopped, up to the board's limit."""
    board.flush_rows()
    # The outcome of a task that a user marked is already decided.
    wanted = and_(_TASK.run == run.id, _TASK.state.not_in(_ENDED), _TASK.ending_outcome.is_(None))
    if run.stop == "fail_fast":
        # Started tasks may finish; teardowns clean up afterwards.
        wanted = and_(wanted, _TASK.tries == _TASK.tries_before, _TASK.task_id.not_in(run.plan.teardowns))
    parts = [select(_TASK.id).where(and_(wanted, text(IS_UNMAPPED)))]
    if run.plan.maps:
        busy = select(_MAP.task_id).where(and_(_MAP.run == run.id, _MAP.waiting + _MAP.unfinished + _MAP.retrying > 0))
        # The tasks of a unit are stopped, not the unit.
        elements = and_(_TASK.map_index >= 0, _TASK.task_id.in_(busy), _TASK.task_id.not_in(list(run.plan.groups)))
        parts.append(select(_TASK.id).where(and_(wanted, elements)))
    statement = union_all(*parts).order_by("id").limit(board.limit + 1)
    found = board.connection.execute(statement).scalars().all()
    tasks = found[: board.limit]
    board.add(tasks)
    triggerers = board.find_triggerers(board.tasks[task] for task in tasks)
    for task in tasks:
        cancel = Cancel(request=run.stop or "", triggerer=triggerers.get(task))
        board.give(board.tasks[task], cancel, f"run {run.reason or run.stop}")
    board.settle()
    if len(found) > board.limit:
        board.left = True
    else:
        run.stop, run.changed = None, True


def end_run(board: Board, run: RunEntry) -> None:
    """End a run whose tasks have all ended; its leaves decide the outcome, and failures that stopped something."""
    board.load((run.id, name, UNMAPPED) for name in run.plan.leaves)
    bad = (TaskState.FAILED, TaskState.UPSTREAM_FAILED)
    leaves = [board.find(run.id, name) for name in sorted(run.plan.leaves)]
    failed = [leaf.task_id for leaf in leaves if leaf is not None and leaf.row.state in bad]
    failed = failed or _find_stopping(board, run)
    state = "failed" if failed or run.reason else "success"
    if run.state != state:
        name = "on_failure" if state == "failed" else "on_success"
        if name in run.plan.structure.callbacks:
            cause = run.reason or (f"tasks failed: {', '.join(failed[:20])}" if failed else None)
            board.add_callback(DueCallback(run.id, None, 0, name, cause, "default"))
        board.context.bells.add(Channel.SCHEDULER)
    # Nothing is left to stop; what a user clears now has to run.
    run.state, run.ended_us, run.stop, run.changed = state, board.context.now_us, None, True


def _find_stopping(board: Board, run: RunEntry) -> list[str]:
    """Return the failed tasks that stopped others: leaves that were skipped for that reason do not say that it failed.

    These are all failed tasks of a fail-fast run, except teardowns, and maps that more elements failed of than may.
    """
    plan = run.plan
    if not (plan.structure.fail_fast or plan.maps):
        return []
    board.flush_rows()
    mine = and_(_TASK.run == run.id, _TASK.state == TaskState.FAILED.value, text(IS_UNMAPPED))
    found = select(_TASK.task_id).where(mine).order_by(_TASK.number)
    if plan.structure.fail_fast:
        found = found.where(_TASK.task_id.not_in(plan.teardowns))
    else:
        of_map = and_(_MAP.task == _TASK.id, _MAP.stop == MapStopReason.FAILED_ELEMENTS.value)
        found = found.join(task_map, of_map)
    return list(board.connection.execute(found).scalars())


def draw_bits() -> int:
    """Draw the random bits from which the state machine computes the delay of a retry."""
    return random.getrandbits(JITTER_BITS)


def name_outcomes(answers: Sequence[Answer | None]) -> list[str]:
    """Name the results of inputs: moved, already, fenced, refused or unknown."""
    return ["unknown" if answer is None else type(answer).__name__.lower() for answer in answers]
