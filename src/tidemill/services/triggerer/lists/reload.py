"""What the entries of a list mean to a host: which triggers it runs, and what a reload changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.core.triggers.lifecycle import Restart
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reload did, as names of triggers."""

    started: list[str]
    removed: list[str]
    replaced: list[str]


def compare_lists(old: Mapping[str, TriggerSpec], new: Mapping[str, TriggerSpec]) -> Changes:
    """Return what a reload of a list has to do."""
    replaced = [name for name, spec in new.items() if name in old and _is_another(old[name], spec)]
    return Changes([name for name in new if name not in old], [name for name in old if name not in new], replaced)


def _is_another(old: TriggerSpec, new: TriggerSpec) -> bool:
    """Tell whether an entry has become another trigger under the old name."""
    return (old.classpath, old.kwargs) != (new.classpath, new.kwargs)


def should_run(record: TriggerRecord) -> bool:
    """Tell whether a trigger is to be run by a host that starts."""
    restart = Restart(record.spec.restart)
    if record.state is TriggerState.FINISHED:
        return restart is Restart.ALWAYS
    if record.state is TriggerState.FAILED:
        return restart is not Restart.NEVER
    return True


def find_serialized(record: TriggerRecord) -> tuple[str, str] | None:
    """Return what `serialize()` of a trigger returned that has not finished; one that has starts over as listed."""
    if record.serialized is None or record.state is TriggerState.FINISHED:
        return None
    classpath, kwargs = json.loads(record.serialized)
    return classpath, kwargs
