"""Decides which triggers of a list a host runs, and what a reload changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.core.triggers.lifecycle import Restart
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a reload, as names of triggers."""

    started: list[str]
    removed: list[str]
    replaced: list[str]


def compare_lists(old: Mapping[str, TriggerSpec], new: Mapping[str, TriggerSpec]) -> Changes:
    """Return the changes that a reload has to make."""
    replaced = [name for name, spec in new.items() if name in old and _is_another(old[name], spec)]
    return Changes([name for name in new if name not in old], [name for name in old if name not in new], replaced)


def _is_another(old: TriggerSpec, new: TriggerSpec) -> bool:
    """Return whether an entry now describes another trigger under the old name."""
    return (old.classpath, old.kwargs) != (new.classpath, new.kwargs)


def should_run(record: TriggerRecord) -> bool:
    """Return whether a starting host should run a trigger."""
    restart = Restart(record.spec.restart)
    if record.state is TriggerState.FINISHED:
        return restart is Restart.ALWAYS
    if record.state is TriggerState.FAILED:
        return restart is not Restart.NEVER
    return True


def find_serialized(record: TriggerRecord) -> tuple[str, str] | None:
    """Return the stored result of an unfinished trigger's `serialize()`; a finished trigger starts over as listed."""
    if record.serialized is None or record.state is TriggerState.FINISHED:
        return None
    classpath, kwargs = json.loads(record.serialized)
    return classpath, kwargs
