"""The reasons why a pipeline is not ready: the response of `/readyz`, which anyone who reaches the port may read.

It names the problems but never quotes an error, because a sink's response may contain data. `tidemill status` shows the
full texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.runtime.link.progress import find_stalled_partitions
from tidemill.spark.live.status_report import find_problems, is_starting
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunPhase, RunState

#: External dependencies of an engine, by the name under which it reports them as stalled.
_OUTSIDE = {"kafka": "the brokers cannot be reached", "dead letters": "the broker does not accept dead letters"}


def find_unready(state: RunState, progress: PipelineProgress, orphans: Sequence[int] = ()) -> list[str]:
    """Return the reasons why the pipeline is not ready; none if it is ready.

    Args:
        state: The current state of the run.
        progress: The sums over its engines.
        orphans: Partitions of the source topic that no engine of the group owns.

    Example:
        >>> find_unready(RunState(RunPhase.STOPPING), PipelineProgress())
        ['it is stopping']
    """
    problems = find_problems(state, progress)
    if is_starting(state, progress) or state.phase is RunPhase.STOPPING:
        return problems
    if state.phase is RunPhase.DRAINING:
        return ["it is draining", *problems]
    if not progress.partitions:
        problems.append("no partition is assigned to it")
    problems += [text for name, text in _OUTSIDE.items() if name in progress.waits]
    problems += [f"{name} is down" for name in sorted(progress.waits) if name.startswith("sinks.")]
    problems += [f"partition {name} is stalled" for name in sorted(find_stalled_partitions(progress.waits))]
    problems += [f"partition {partition} has no owner" for partition in orphans]
    return problems
